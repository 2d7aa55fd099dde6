package checkpoint

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/collective"
	"mula/xpu"
	"mula/xpu/comm"
)

// pieceHeader is the number of bytes before the elements of a piece in a message.
const pieceHeader = 4 * 8

// damage is the error about a checkpoint whose files differ from its manifest.
type damage struct{ error }

func (d damage) Unwrap() error { return d.error }

// IsDamage reports whether an error of [Shard.Load] means that the checkpoint is damaged, so that
// an older one can be used.
func IsDamage(err error) bool { return errors.As(err, new(damage)) }

// Load sets the weights and the optimizer's state of this rank to the checkpoint's, written by
// ranks of any layout. It reads the files that [Candidate] has not verified. All ranks call it. It
// fails on all ranks if it fails on one; the weights and the state are then undefined.
//
// Each file has one reader, a rank that opens it once, reads it from the first byte to the last,
// hashes the bytes, and sends the elements to the ranks that need them. The ranks do this in
// rounds:
//
//  1. A rank that has sent all its elements reads up to 16 MiB of them. It stores elements that it
//     needs itself.
//  2. It offers its pieces to their receivers, up to 16 MiB in all.
//  3. A rank accepts offers up to 16 MiB in all, and at least one.
//  4. The accepted pieces are exchanged.
//
// So all ranks together read the bytes of the checkpoint once. A rank receives the elements that it
// needs and has not read, as float32. It has three buffers of at most 16 MiB.
func (s Shard) Load(ctx context.Context, world *comm.Comm, c *Checkpoint) error {
	s, divide := s.joinedForLoad()
	l := &loader{Shard: s, world: world, from: c}
	defer l.close()
	err := l.load(ctx)
	if err == nil {
		err = divide(ctx)
	}
	if err != nil && !IsDamage(err) {
		err = fmt.Errorf("loading checkpoint %s: %w", c.Name(), err)
	}
	return err
}

// A loader loads a checkpoint on one rank.
type loader struct {
	Shard
	world *comm.Comm
	from  *Checkpoint
	index indexes

	content map[string][]tensorRange // of each file; not of a single file of the state
	targets [][]target               // of this rank, of each tensor of the model
	needs   [][]need                 // of other ranks, of each tensor of the model
	limit   int                      // bytes of pieces that a rank sends, or receives, in a round at most

	// What this rank reads.
	files   []string          // not yet opened
	file    *hashedFile       // open; nil for none
	tensors *safetensors.File // in file
	entries []fileEntry       // of file, not yet read, in the order of their bytes
	window  []float32
	pieces  []piece // in window, not yet sent

	metadata map[string]string // the optimizer's
	buffers  [2][]byte         // of messages sent and received
}

// indexes has the indexes of a checkpoint; nil if there is a single file.
type indexes struct {
	Model *safetensors.Index `json:"model"`
	State *stateIndex        `json:"state"`
}

// A target is a range that this rank needs.
type target struct {
	tensorRange
	values xpu.Tensor
}

// A need is a range that another rank needs, in a file that this rank reads.
type need struct {
	tensorRange
	to int
}

// A fileEntry is the part of a tensor in a file that is not yet read.
type fileEntry struct {
	tensorRange
	name string
	from int // first element of the complete entry
}

// A piece is elements for another rank.
type piece struct {
	tensorRange
	to     int
	values []float32
}

func (p piece) bytes() int { return pieceHeader + 4*len(p.values) }

func (l *loader) load(ctx context.Context) error {
	if s := l.from.snapshot; s != nil {
		l.index = s.index
	} else if err := fromFirst(ctx, l.world, &l.index, l.readIndexes); err != nil {
		return judged(err)
	}
	wanted, err := l.prepare()
	if err := collective.Agree(ctx, l.world, err); err != nil {
		return err
	}
	if err := l.meet(ctx, wanted); err != nil {
		return &collective.BrokenError{Err: err}
	}
	err = l.rounds(ctx)
	if collective.IsBroken(err) {
		return err
	}
	if err := allJudge(ctx, l.world, err); err != nil {
		return judged(err)
	}
	if l.index.State != nil {
		l.metadata = l.index.State.Metadata
	} else if err := collective.Broadcast(ctx, l.world, &l.metadata); err != nil { // rank 0 reads a single file
		return err
	}
	return collective.OfAll(l.world, l.setMetadata(l.metadata))
}

// judged marks an error of allJudge that means damage.
func judged(err error) error {
	if damaged(err) {
		return damage{err}
	}
	return err
}

// readIndexes reads the indexes on rank 0.
func (l *loader) readIndexes() error {
	c := l.from
	var errs [2]error
	if c.manifest.loads(modelIndexFile) {
		errs[0] = c.manifest.read(c.fsys, c.Dir, modelIndexFile, &l.index.Model)
	}
	if c.manifest.loads(optimizerIndexFile) {
		errs[1] = c.manifest.read(c.fsys, c.Dir, optimizerIndexFile, &l.index.State)
	}
	return errors.Join(errs[:]...)
}

// prepare compares the indexes with the model and the manifest, and sets the content of all files,
// the targets and the files that this rank reads. It returns the ranges that this rank needs from
// each other rank, four numbers each.
func (l *loader) prepare() (wanted [][]int64, err error) {
	if err := l.setTargets(); err != nil {
		return nil, err
	}
	kinds := [2]map[string]bool{{}, {}} // files of weights, and of the state
	if l.content = map[string][]tensorRange{}; l.index.Model == nil {
		kinds[0][modelFile] = true
		for i := range l.Shard.tensors {
			l.content[modelFile] = append(l.content[modelFile], l.weights(i))
		}
	} else if err := l.placeWeights(kinds[0]); err != nil {
		return nil, fmt.Errorf("%s: %w", l.path(modelIndexFile), err)
	}
	if l.index.State == nil {
		kinds[1][optimizerFile] = true
	} else {
		ranges, err := l.parse(*l.index.State)
		if err == nil {
			err = l.check(ranges)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l.path(optimizerIndexFile), err)
		}
		for _, r := range ranges {
			kinds[1][r.file] = true
			l.content[r.file] = append(l.content[r.file], r.tensorRange)
		}
	}
	for name := range l.from.manifest.Files {
		if isTensorFile(name) && !kinds[0][name] && !kinds[1][name] {
			return nil, fmt.Errorf("%s is in %s, but in no index", l.path(name), manifestFile)
		}
	}
	wanted = make([][]int64, l.world.Size())
	bytes := int64(0)
	for _, kind := range kinds {
		names := slices.Sorted(maps.Keys(kind))
		for i, name := range names {
			info, listed := l.from.manifest.Files[name]
			if !listed {
				return nil, fmt.Errorf("%s: %q is in an index, but not in %s", l.from.Dir, name, manifestFile)
			}
			reader := readerOf(i, len(names), l.world.Size())
			if s := l.from.snapshot; s != nil {
				reader = s.readers[name]
			}
			if reader != l.world.Rank() {
				wanted[reader] = l.appendWanted(wanted[reader], name)
			} else {
				l.files, bytes = append(l.files, name), bytes+info.Bytes
			}
		}
	}
	window := cmp.Or(l.Shard.window, 4<<20)
	l.limit = 4*window + pieceHeader                                   // a piece of the window is not larger
	l.window = make([]float32, 0, max(1, min(int64(window), bytes/2))) // an element has at least two bytes
	return wanted, nil
}

// setTargets sets the targets.
func (l *loader) setTargets() error {
	l.targets = make([][]target, len(l.Shard.tensors))
	for _, h := range l.held {
		for _, r := range h.read {
			state := weightsState
			if r.name != "" {
				if state = slices.Index(l.states[h.index], r.name); state < 0 {
					return fmt.Errorf("%s has no %s", l.Shard.tensors[h.index].Name, r.name)
				}
			}
			part := tensorRange{h.index, state, r.begin, r.begin + r.values.Elements()}
			l.targets[h.index] = append(l.targets[h.index], target{part, r.values})
		}
	}
	return nil
}

// appendWanted appends the ranges of a file that this rank needs, four numbers each.
func (l *loader) appendWanted(numbers []int64, file string) []int64 {
	content, known := l.content[file]
	if !known { // a single file of the state
		for i, states := range l.states {
			for j := range states {
				content = append(content, tensorRange{i, j, 0, int(l.Shard.tensors[i].Elements())})
			}
		}
	}
	for _, r := range content {
		for _, t := range l.targets[r.tensor] {
			if both, some := r.and(t.tensorRange); some {
				numbers = append(numbers, int64(both.tensor), int64(both.state), int64(both.begin), int64(both.end))
			}
		}
	}
	return numbers
}

// readerOf returns the rank that reads file i of n. If the ranks of this layout have written the
// files, a rank reads the files that it has written.
func readerOf(i, n, ranks int) int { return i * ranks / n }

// isTensorFile reports whether a file of a checkpoint has weights or state.
func isTensorFile(name string) bool { return strings.HasSuffix(name, ".safetensors") }

// loads reports whether Load reads a file, and compares its hash.
func (m *manifest) loads(name string) bool {
	_, single := m.Files[modelFile]
	_, singleState := m.Files[optimizerFile]
	return isTensorFile(name) || name == modelIndexFile && !single || name == optimizerIndexFile && !singleState
}

func (l *loader) path(name string) string { return objects.Join(l.from.Dir, name) }

// weights returns the range of the weights of a tensor.
func (l *loader) weights(tensor int) tensorRange {
	return tensorRange{tensor, weightsState, 0, int(l.Shard.tensors[tensor].Elements())}
}

// placeWeights sets the content of the files of weights, and adds their names to files.
func (l *loader) placeWeights(files map[string]bool) error {
	var wrong []string
	known := map[string]bool{}
	for i, t := range l.Shard.tensors {
		known[t.Name] = true
		file, ok := l.index.Model.WeightMap[t.Name]
		if !ok {
			wrong = append(wrong, t.Name+" is missing")
			continue
		}
		files[file] = true
		l.content[file] = append(l.content[file], l.weights(i))
	}
	for _, name := range slices.Sorted(maps.Keys(l.index.Model.WeightMap)) {
		if !known[name] {
			wrong = append(wrong, name+" does not belong to this model")
		}
	}
	return someWrong(wrong)
}

// meet sends to each other rank the ranges that this rank needs from it, and sets the needs.
func (l *loader) meet(ctx context.Context, wanted [][]int64) error {
	n, rank := l.world.Size(), l.world.Rank()
	lengths, received := make([]int64, n), make([]int64, n)
	for r := range n {
		lengths[r] = int64(len(wanted[r]))
	}
	each := evenBounds(n)
	if err := comm.AllToAll(ctx, l.world, lengths, each, received, each); err != nil {
		return err
	}
	sendBounds, recvBounds := make([]int, n+1), make([]int, n+1)
	for r := range n {
		sendBounds[r+1], recvBounds[r+1] = sendBounds[r]+int(lengths[r]), recvBounds[r]+int(received[r])
	}
	numbers := make([]int64, recvBounds[n])
	if err := comm.AllToAll(ctx, l.world, slices.Concat(wanted...), sendBounds, numbers, recvBounds); err != nil {
		return err
	}
	l.needs = make([][]need, len(l.Shard.tensors))
	for i := 1; i < n; i++ { // each rank starts with another receiver
		to := (rank + i) % n
		for x := range slices.Chunk(numbers[recvBounds[to]:recvBounds[to+1]], 4) {
			r := tensorRange{int(x[0]), int(x[1]), int(x[2]), int(x[3])}
			l.needs[r.tensor] = append(l.needs[r.tensor], need{r, to})
		}
	}
	return nil
}

// rounds reads all files and exchanges their content, until a rank fails. It returns the error of
// this rank.
func (l *loader) rounds(ctx context.Context) (err error) {
	for {
		if len(l.pieces) == 0 && err == nil {
			err = l.fill(ctx)
		}
		progress := []int64{int64(len(l.pieces)), 0} // of all ranks: pieces to send, failures
		if err != nil {
			progress[1] = 1
		}
		if l.world.Size() > 1 {
			if err := comm.AllReduce(ctx, l.world, progress); err != nil {
				return &collective.BrokenError{Err: err}
			}
		}
		if progress[1] > 0 || progress[0] == 0 {
			return err
		}
		if err := l.exchange(ctx); err != nil {
			return &collective.BrokenError{Err: err}
		}
	}
}

// fill reads elements until the window is full or all files are read.
func (l *loader) fill(ctx context.Context) error {
	l.window = l.window[:0]
	for len(l.window) < cap(l.window) {
		err := ctx.Err()
		switch {
		case err != nil:
		case l.file != nil && len(l.entries) > 0:
			err = l.readEntry()
		case l.file != nil:
			if err := l.end(ctx, nil); err != nil {
				return err
			}
		case len(l.files) > 0:
			err = l.open()
		default:
			return nil
		}
		if err != nil {
			return l.end(ctx, err)
		}
	}
	return nil
}

// open opens the next file and reads its header.
func (l *loader) open() (err error) {
	name := l.files[0]
	l.files = l.files[1:]
	if l.file, err = openHashed(l.from.fsys, l.path(name), l.from.manifest.Files[name]); err != nil {
		return err
	}
	if l.tensors, err = safetensors.Read(l.file, l.file.want.Bytes, l.file.path); err != nil {
		return err
	}
	content, known := l.content[name]
	if !known { // a single file of the state
		l.metadata = l.tensors.Metadata()
		index := stateIndex{WeightMap: map[string]string{}}
		for _, t := range l.tensors.Tensors() {
			index.WeightMap[t.Name] = name
		}
		ranges, err := l.parse(index)
		if err == nil {
			err = l.check(ranges)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", l.file.path, err)
		}
		for _, r := range ranges {
			content = append(content, r.tensorRange)
		}
	}
	if err := l.checkContent(l.tensors, content); err != nil {
		return err
	}
	byName := make(map[string]tensorRange, len(content))
	for _, r := range content {
		byName[l.rangeName(r)] = r
	}
	l.entries = l.entries[:0]
	for _, t := range l.tensors.Tensors() {
		r := byName[t.Name]
		l.entries = append(l.entries, fileEntry{r, t.Name, r.begin})
	}
	return nil
}

// readEntry reads elements of the next entry, keeps what this rank needs, and appends pieces for
// other ranks.
func (l *loader) readEntry() error {
	e := &l.entries[0]
	at := len(l.window)
	n := min(e.end-e.begin, cap(l.window)-at)
	values := l.window[at : at+n]
	if err := l.tensors.Float32(values, e.name, int64(e.begin-e.from)); err != nil {
		return err
	}
	r := tensorRange{e.tensor, e.state, e.begin, e.begin + n}
	l.store(r, values)
	for _, want := range l.needs[r.tensor] {
		if part, some := r.and(want.tensorRange); some {
			l.pieces = append(l.pieces, piece{part, want.to, values[part.begin-r.begin : part.end-r.begin]})
			l.window = l.window[:at+n] // keep the values until they are sent
		}
	}
	if e.begin += n; e.begin == e.end {
		l.entries = l.entries[1:]
	}
	return nil
}

// end closes the open file, if there is one, and compares its hash. failed is an error of this
// rank; a wrong hash explains it.
func (l *loader) end(ctx context.Context, failed error) error {
	rank := l.world.Rank()
	if l.from.snapshot != nil {
		rank = 0 // no other rank sees the file
	}
	if l.file == nil {
		return fileError(rank, failed)
	}
	f := l.file
	defer l.close()
	if err := f.finish(ctx); err != nil {
		return fileError(rank, err)
	}
	if err := f.compare(); err != nil {
		return err
	}
	if failed != nil {
		return unjudged{failed}
	}
	return nil
}

// close closes the open file.
func (l *loader) close() {
	if l.file != nil {
		l.file.Close()
		l.file, l.entries = nil, nil
	}
}

// store stores the elements of a range that this rank needs.
func (l *loader) store(r tensorRange, values []float32) {
	for _, t := range l.targets[r.tensor] {
		both, some := r.and(t.tensorRange)
		if !some {
			continue
		}
		into, part := t.values.Rows(both.begin-t.begin, both.end-t.begin), values[both.begin-r.begin:both.end-r.begin]
		l.set(into, part)
	}
}

// set sets a tensor of one dimension.
func (s Shard) set(into xpu.Tensor, values []float32) {
	if host := into.Host(); host != nil {
		copy(host, values)
	} else {
		s.device.Write(into, values)
	}
}

// exchange sends pieces to the ranks that accept them, and stores the received ones.
func (l *loader) exchange(ctx context.Context) error {
	n, rank := l.world.Size(), l.world.Rank()
	each := evenBounds(n)
	offers, offered := make([]int64, n), make([]int64, n) // bytes to each rank, from each rank
	count, total := 0, 0                                  // of the offered pieces
	for count < len(l.pieces) && total+l.pieces[count].bytes() <= l.limit {
		p := l.pieces[count]
		offers[p.to] += int64(p.bytes())
		count, total = count+1, total+p.bytes()
	}
	if err := comm.AllToAll(ctx, l.world, offers, each, offered, each); err != nil {
		return err
	}
	accepts, accepted := make([]uint8, n), make([]uint8, n) // 1: the offer of, or to, a rank
	incoming := int64(0)
	for i := 1; i < n; i++ { // first the rank that starts with this receiver
		from := (rank - i + n) % n
		if incoming+offered[from] <= int64(l.limit) {
			accepts[from], incoming = 1, incoming+offered[from]
		}
	}
	if err := comm.AllToAll(ctx, l.world, accepts, each, accepted, each); err != nil {
		return err
	}

	sendBounds, recvBounds := make([]int, n+1), make([]int, n+1)
	for r := range n {
		sendBounds[r+1] = sendBounds[r] + int(offers[r])*int(accepted[r])
		recvBounds[r+1] = recvBounds[r] + int(offered[r])*int(accepts[r])
	}
	send := resize(&l.buffers[0], sendBounds[n])
	ends := slices.Clone(sendBounds[:n])
	kept := l.pieces[:0]
	for i, p := range l.pieces {
		if i >= count || accepted[p.to] == 0 {
			kept = append(kept, p)
			continue
		}
		message := send[ends[p.to]:ends[p.to]]
		for _, x := range [...]int{p.tensor, p.state, p.begin, p.end} {
			message = binary.LittleEndian.AppendUint64(message, uint64(x))
		}
		message = append(message, bytesOf(p.values)...)
		ends[p.to] += len(message)
	}
	l.pieces = kept
	recv := resize(&l.buffers[1], recvBounds[n])
	if err := comm.AllToAll(ctx, l.world, send, sendBounds, recv, recvBounds); err != nil {
		return err
	}
	l.storeAll(recv)
	return nil
}

// evenBounds returns the bounds of one element for each rank.
func evenBounds(ranks int) []int {
	bounds := make([]int, ranks+1)
	for r := range bounds {
		bounds[r] = r
	}
	return bounds
}

// resize sets the length of *buffer.
func resize(buffer *[]byte, n int) []byte {
	if n > cap(*buffer) {
		*buffer = make([]byte, n)
	}
	*buffer = (*buffer)[:n]
	return *buffer
}

// storeAll stores received pieces.
func (l *loader) storeAll(message []byte) {
	var values []float32
	for len(message) > 0 {
		var x [4]int
		for i := range x {
			x[i] = int(int64(binary.LittleEndian.Uint64(message[8*i:])))
		}
		r := tensorRange{x[0], x[1], x[2], x[3]}
		values = slices.Grow(values[:0], r.end-r.begin)[:r.end-r.begin]
		message = message[pieceHeader+copy(bytesOf(values), message[pieceHeader:]):]
		l.store(r, values)
	}
}

// A hashedFile is a file that is read from its first byte to its last, and hashed.
type hashedFile struct {
	filesystem.File
	path string
	want shards.FileInfo
	hash hash.Hash
	at   int64
}

func openHashed(fsys filesystem.FS, path string, want shards.FileInfo) (*hashedFile, error) {
	f, err := filesystem.Open(fsys, path)
	if err != nil {
		return nil, err
	}
	return &hashedFile{f, path, want, sha256.New(), 0}, nil
}

// ReadAt reads the next bytes.
func (f *hashedFile) ReadAt(p []byte, off int64) (int, error) {
	if off != f.at {
		return 0, fmt.Errorf("%s: byte %d is read after byte %d", f.path, off, f.at)
	}
	n, err := f.File.ReadAt(p, off)
	f.hash.Write(p[:n])
	f.at += int64(n)
	return n, err
}

// finish reads the rest of the file.
func (f *hashedFile) finish(ctx context.Context) error {
	buffer := make([]byte, max(1, min(1<<20, f.want.Bytes-f.at)))
	for {
		if ctx.Err() != nil {
			return fmt.Errorf("hashing %s: %w", f.path, context.Cause(ctx))
		}
		if _, err := f.ReadAt(buffer, f.at); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// compare returns an error if the complete file differs from the manifest.
func (f *hashedFile) compare() error {
	return compareFile(f.path, shards.FileInfo{Bytes: f.at, SHA256: hex.EncodeToString(f.hash.Sum(nil))}, f.want)
}

func compareFile(path string, found, want shards.FileInfo) error {
	switch {
	case found.Bytes != want.Bytes:
		return wrongSize(path, found.Bytes, want.Bytes)
	case found.SHA256 != want.SHA256:
		return fmt.Errorf("%s has SHA-256 %s, but %s says %s; one of the two files was changed", path, found.SHA256,
			manifestFile, want.SHA256)
	}
	return nil
}

func wrongSize(path string, found, want int64) error {
	return fmt.Errorf("%s has %d bytes, but %s says %d; one of the two files was changed", path, found, manifestFile,
		want)
}

// fileError adds to an error of opening or reading a file what it means for the checkpoint.
func fileError(rank int, err error) error {
	switch {
	case rank != 0 && errors.Is(err, fs.ErrNotExist):
		return unjudged{fmt.Errorf("cannot see a file that rank 0 sees: %w; %s", err, needShared)}
	case errors.As(err, new(*fs.PathError)) || errors.Is(err, fs.ErrNotExist):
		return err
	}
	return unjudged{err}
}
