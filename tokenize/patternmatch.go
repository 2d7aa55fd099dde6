package tokenize

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// A pattern runs as a program with backtracking: alternatives are tried in order, and the first
// path to the end is the match.

type opcode uint8

const (
	opMatch     opcode = iota
	opSet              // one character of the set
	opRun              // as many characters of the set as possible, up to max, and then fewer
	opLazyRun          // no character of the set, and then more, up to max
	opWholeRun         // as many characters as possible, up to max, and never fewer
	opSplit            // continue at the next instruction, and then at to
	opLazySplit        // continue at to, and then at the next instruction
	opJump             // continue at to
	opEnter            // an atomic group or a lookaround; start and end have the same mark
	opAtomicEnd        // discard the alternatives inside
	opLookEnd          // and return to the start of the lookaround
	opEnterNot         // a negative lookaround: if the following instructions fail, continue at to
	opNotEnd           // the following instructions did not fail
	opBack             // move back by max characters
	opAnchor
)

type instruction struct {
	op     opcode
	anchor anchor
	to     int
	max    int // of runs and opBack; of runs also unbounded
	mark   int
	slot   int // of splits and runs: number of the state
	set    *runeBits
}

// runeBits is a runeSet for fast lookups: pages of 64 code points, with equal pages stored once.
type runeBits struct {
	page [(utf8.MaxRune + 1) >> 6]uint16
	bits []uint64
}

func newRuneBits(set runeSet) *runeBits {
	b := &runeBits{}
	var flat [(utf8.MaxRune + 1) >> 6]uint64
	for _, x := range set {
		for r := x.lo; r <= x.hi; r++ {
			if r&63 == 0 && r+63 <= x.hi {
				flat[r>>6] = ^uint64(0)
				r += 63
				continue
			}
			flat[r>>6] |= 1 << (r & 63)
		}
	}
	stored := map[uint64]uint16{}
	for p, bits := range flat {
		if p > 0 && bits == flat[p-1] {
			b.page[p] = b.page[p-1]
			continue
		}
		k, ok := stored[bits]
		if !ok {
			k = uint16(len(b.bits))
			stored[bits] = k
			b.bits = append(b.bits, bits)
		}
		b.page[p] = k
	}
	return b
}

func (b *runeBits) has(r rune) bool { return b.bits[b.page[r>>6]]>>(r&63)&1 != 0 }

// of returns the length of the character at s[i:] if the set contains it, otherwise 0.
func (b *runeBits) of(s []byte, i int) int {
	if i >= len(s) {
		return 0
	}
	r, n := rune(s[i]), 1
	if r >= utf8.RuneSelf {
		r, n = utf8.DecodeRune(s[i:])
	}
	if !b.has(r) {
		return 0
	}
	return n
}

// patternCompiler writes the program.
type patternCompiler struct {
	p      *pattern
	bits   map[string]*runeBits
	ofNode map[*node]*runeBits // of nodes in a repeat, which are emitted many times
	marks  int
}

var errTooLong = errors.New("its program would be too long; use smaller counts")

func (c *patternCompiler) add(i instruction) int {
	if i.op == opSplit || i.op == opLazySplit || i.op == opRun || i.op == opLazyRun || i.op == opWholeRun {
		i.slot = c.p.slots
		c.p.slots++
	}
	c.p.program = append(c.p.program, i)
	return len(c.p.program) - 1
}

func (c *patternCompiler) bitsOf(set runeSet) *runeBits {
	key := fmt.Sprint(set)
	b, ok := c.bits[key]
	if !ok {
		b = newRuneBits(set)
		c.bits[key] = b
	}
	return b
}

// setOf is bitsOf for the set of a node, which is parsed.
func (c *patternCompiler) setOf(n *node) *runeBits {
	b, ok := c.ofNode[n]
	if !ok {
		set := n.set
		if n.kind == atAnchor {
			set = pinnedOniguruma().properties["word"]
		}
		b = c.bitsOf(append(runeSet{}, set...).normalized())
		c.ofNode[n] = b
	}
	return b
}

func (c *patternCompiler) emit(n *node) error {
	if len(c.p.program) > maxProgram {
		return errTooLong
	}
	here := func() int { return len(c.p.program) }
	switch n.kind {
	case sequence:
		for _, m := range n.nodes {
			if err := c.emit(m); err != nil {
				return err
			}
		}
	case choice:
		var ends []int
		for i, m := range n.nodes {
			split := -1
			if i < len(n.nodes)-1 {
				split = c.add(instruction{op: opSplit})
			}
			if err := c.emit(m); err != nil {
				return err
			}
			if split >= 0 {
				ends = append(ends, c.add(instruction{op: opJump}))
				c.p.program[split].to = here()
			}
		}
		for _, e := range ends {
			c.p.program[e].to = here()
		}
	case oneOf:
		c.add(instruction{op: opSet, set: c.setOf(n)})
	case repeat:
		return c.emitRepeat(n, opRun)
	case atomic:
		inner := n.nodes[0]
		if inner.kind == repeat && inner.nodes[0].kind == oneOf && !inner.lazy {
			return c.emitRepeat(inner, opWholeRun)
		}
		mark := c.enter(instruction{op: opEnter})
		if err := c.emit(inner); err != nil {
			return err
		}
		c.add(instruction{op: opAtomicEnd, mark: mark})
	case look:
		if n.negative {
			at := here()
			mark := c.enter(instruction{op: opEnterNot})
			if err := c.emit(n.nodes[0]); err != nil {
				return err
			}
			c.add(instruction{op: opNotEnd, mark: mark})
			c.p.program[at].to = here()
			return nil
		}
		mark := c.enter(instruction{op: opEnter})
		if err := c.emit(n.nodes[0]); err != nil {
			return err
		}
		c.add(instruction{op: opLookEnd, mark: mark})
	case back:
		c.add(instruction{op: opBack, max: n.min})
	case atAnchor:
		c.add(instruction{op: opAnchor, anchor: n.anchor, set: c.setOf(n)})
	}
	return nil
}

func (c *patternCompiler) enter(i instruction) int {
	c.marks++
	i.mark = c.marks
	c.add(i)
	return i.mark
}

// emitRepeat emits a repeat; run is the opcode that repeats a set greedily.
func (c *patternCompiler) emitRepeat(n *node, run opcode) error {
	inner := n.nodes[0]
	for range n.min {
		before := len(c.p.program)
		if err := c.emit(inner); err != nil {
			return err
		}
		if len(c.p.program) == before {
			break // empty in any case; nested counts could take forever to detect that
		}
	}
	if n.max == n.min {
		return nil
	}
	if inner.kind == oneOf {
		i := instruction{op: run, max: unbounded, set: c.setOf(inner)}
		if n.max != unbounded {
			i.max = n.max - n.min
		}
		if n.lazy {
			i.op = opLazyRun
		}
		c.add(i)
		return nil
	}
	split := instruction{op: opSplit}
	if n.lazy {
		split.op = opLazySplit
	}
	if n.max == unbounded {
		at := c.add(split)
		if err := c.emit(inner); err != nil {
			return err
		}
		c.add(instruction{op: opJump, to: at})
		c.p.program[at].to = len(c.p.program)
		return nil
	}
	var splits []int
	for range n.max - n.min {
		splits = append(splits, c.add(split))
		if err := c.emit(inner); err != nil {
			return err
		}
	}
	for _, at := range splits {
		c.p.program[at].to = len(c.p.program)
	}
	return nil
}

// A finder finds the matches of a pattern in a text, for one goroutine. The pattern reuses released
// finders, so nothing is allocated once their scratch memory has grown.
//
// After many steps in a text, the finder starts to remember failed states (instruction and
// position) and never tries them again, even in later searches of the same text. The time is then
// proportional to the length of the text times the length of the program, and more only if a
// lookahead or an atomic group is long and succeeds at many positions. The memory is a few bits per
// byte of the text, and is not used above maxRemembered.
type finder struct {
	p        *pattern
	s        []byte
	stack    []frame
	steps    int
	remember bool
	failed   []uint64 // by slot and position
}

// maxRemembered bounds the bits of finder.failed.
const maxRemembered = 1 << 31

// A frame is an untried alternative.
type frame struct {
	kind     frameKind
	pc       int32 // where to continue; the mark of entered; the slot of exhausted
	mark     int32 // of otherwise: the mark of a negative lookaround, or 0
	pos, end int
}

type frameKind uint8

const (
	otherwise frameKind = iota // continue at pc and pos
	fewer                      // a run from pos to end: continue at pc, one character before end
	// a lazy run that is at pos and may take end more characters: pc is the run's instruction
	moreChars
	entered   // an atomic group or a lookaround started at pos
	exhausted // the state of slot pc fails at pos to end
)

// release returns the finder to its pattern. It must not be used afterwards.
func (f *finder) release() {
	f.s, f.steps, f.remember = nil, 0, false
	if cap(f.failed) > keptScratch/8 {
		f.failed = nil
	}
	if cap(f.stack) > keptScratch/8 {
		f.stack = nil
	}
	f.p.finders.Put(f)
}

// find returns the leftmost match at or after from, which may be empty. Anchors and lookbehinds see
// the text before from.
func (f *finder) find(from int) (start, end int, ok bool) {
	first := f.p.first
	for start = from; start <= len(f.s); start++ {
		if first != nil {
			for start < len(f.s) && first.of(f.s, start) == 0 {
				start++
				for start < len(f.s) && !utf8.RuneStart(f.s[start]) {
					start++
				}
			}
			if start == len(f.s) {
				break
			}
		} else {
			for start < len(f.s) && !utf8.RuneStart(f.s[start]) {
				start++
			}
		}
		if end, ok = f.match(start); ok {
			return start, end, true
		}
		for start+1 < len(f.s) && !utf8.RuneStart(f.s[start+1]) {
			start++
		}
	}
	return 0, 0, false
}

func (f *finder) push(x frame) { f.stack = append(f.stack, x) }

func (f *finder) hasFailed(slot, pos int) bool {
	i := slot*(len(f.s)+1) + pos
	return f.failed[i>>6]>>(i&63)&1 != 0
}

// startRemembering is called when a text has taken many steps.
func (f *finder) startRemembering() {
	f.steps = -1 << 62 // once per text
	size := f.p.slots * (len(f.s) + 1)
	if size > maxRemembered {
		return
	}
	f.remember = true
	words := size>>6 + 1
	if cap(f.failed) < words {
		f.failed = make([]uint64, words)
	}
	f.failed = f.failed[:words]
	clear(f.failed)
}

// cut removes the frames down to the frame of a mark, and returns that frame.
func (f *finder) cut(mark int) frame {
	for n := len(f.stack) - 1; ; n-- {
		x := f.stack[n]
		if x.kind == entered && x.pc == int32(mark) || x.kind == otherwise && x.mark == int32(mark) {
			f.stack = f.stack[:n]
			return x
		}
	}
}

// match runs the program at start.
func (f *finder) match(start int) (end int, ok bool) {
	s, program := f.s, f.p.program
	f.stack = f.stack[:0]
	pc, pos := 0, start
	for {
		in := &program[pc]
		fails := false
		switch in.op {
		case opMatch:
			return pos, true
		case opSet:
			n := in.set.of(s, pos)
			fails = n == 0
			pos += n
			pc++
		case opJump:
			pc = in.to
		case opSplit, opLazySplit:
			if f.remember {
				if f.hasFailed(in.slot, pos) {
					fails = true
					break
				}
				f.push(frame{kind: exhausted, pc: int32(in.slot), pos: pos, end: pos})
			}
			now, then := pc+1, in.to
			if in.op == opLazySplit {
				now, then = then, now
			}
			f.push(frame{kind: otherwise, pc: int32(then), pos: pos})
			pc = now
		case opRun, opWholeRun:
			if f.remember && f.hasFailed(in.slot, pos) {
				fails = true
				break
			}
			at, known := pos, false // known: the run fails from there on
			for left := in.max; left != 0; left-- {
				n := in.set.of(s, at)
				if n == 0 {
					break
				}
				at += n
				if f.remember && in.max == unbounded && f.hasFailed(in.slot, at) {
					known = true
					break
				}
			}
			f.steps += at - pos
			if f.remember {
				last := pos
				if in.max == unbounded {
					last = at
				}
				f.push(frame{kind: exhausted, pc: int32(in.slot), pos: pos, end: last})
			}
			if in.op == opRun && at > pos {
				f.push(frame{kind: fewer, pc: int32(pc + 1), pos: pos, end: at})
			}
			fails = known
			pos = at
			pc++
		case opLazyRun:
			if f.remember && f.hasFailed(in.slot, pos) {
				fails = true
				break
			}
			if f.remember {
				f.push(frame{kind: exhausted, pc: int32(in.slot), pos: pos, end: pos})
			}
			f.push(frame{kind: moreChars, pc: int32(pc), pos: pos, end: in.max})
			pc++
		case opEnter:
			f.push(frame{kind: entered, pc: int32(in.mark), pos: pos})
			pc++
		case opEnterNot:
			f.push(frame{kind: otherwise, pc: int32(in.to), mark: int32(in.mark), pos: pos})
			pc++
		case opAtomicEnd:
			f.cut(in.mark)
			pc++
		case opLookEnd:
			pos = f.cut(in.mark).pos
			pc++
		case opNotEnd:
			f.cut(in.mark)
			fails = true
		case opBack:
			for range in.max {
				if pos == 0 {
					fails = true
					break
				}
				_, n := utf8.DecodeLastRune(s[:pos])
				pos -= n
			}
			pc++
		case opAnchor:
			fails = !f.holds(in, pos)
			pc++
		}
		if !fails {
			continue
		}
		if pc, pos, ok = f.next(); !ok {
			return 0, false
		}
	}
}

// next pops the last untried alternative; ok is false if there is none.
func (f *finder) next() (pc, pos int, ok bool) {
	if f.steps++; f.steps > 32*len(f.s)+4096 {
		f.startRemembering()
	}
	for len(f.stack) > 0 {
		n := len(f.stack) - 1
		x := &f.stack[n]
		switch x.kind {
		case otherwise:
			pc, pos = int(x.pc), x.pos
			f.stack = f.stack[:n]
			return pc, pos, true
		case fewer:
			_, size := utf8.DecodeLastRune(f.s[:x.end])
			x.end -= size
			pc, pos = int(x.pc), x.end
			if x.end == x.pos {
				f.stack = f.stack[:n]
			}
			return pc, pos, true
		case moreChars:
			in := &f.p.program[x.pc]
			size := 0
			if x.end != 0 {
				size = in.set.of(f.s, x.pos)
			}
			if size == 0 || f.remember && in.max == unbounded && f.hasFailed(in.slot, x.pos+size) {
				f.stack = f.stack[:n]
				continue
			}
			x.pos += size
			if x.end != unbounded {
				x.end--
			} else if f.remember && n > 0 && f.stack[n-1].kind == exhausted && f.stack[n-1].pc == int32(in.slot) {
				f.stack[n-1].end = x.pos
			}
			return int(x.pc) + 1, x.pos, true
		case exhausted:
			base := int(x.pc) * (len(f.s) + 1)
			for i := base + x.pos; i <= base+x.end; i++ {
				f.failed[i>>6] |= 1 << (i & 63)
			}
			f.stack = f.stack[:n]
		default:
			f.stack = f.stack[:n]
		}
	}
	return 0, 0, false
}

// holds reports whether an anchor holds at pos.
func (f *finder) holds(in *instruction, pos int) bool {
	s := f.s
	switch in.anchor {
	case lineStart: // not after a line break that ends the text
		return pos == 0 || s[pos-1] == '\n' && pos < len(s)
	case lineEnd:
		return pos == len(s) || s[pos] == '\n'
	case textStart:
		return pos == 0
	case textEnd:
		return pos == len(s)
	case textEndOrLine:
		return pos == len(s) || pos == len(s)-1 && s[pos] == '\n'
	}
	before := false
	if pos > 0 {
		r, _ := utf8.DecodeLastRune(s[:pos])
		before = in.set.has(r)
	}
	return (before != (in.set.of(s, pos) > 0)) == (in.anchor == wordEdge)
}
