package launch

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// A Host is a machine that ranks can run on.
type Host struct {
	Name  string
	Slots int // ranks that it has room for; 0: not said
}

// maxSlots is more ranks than a host can have.
const maxSlots = 1 << 16

// ParseHosts reads a list as in "a,b:4,c": names, with the number of ranks that each has room for.
// A name that comes again adds to its room.
func ParseHosts(text string) ([]Host, error) {
	var hosts []Host
	for _, item := range strings.Split(text, ",") {
		name, number, said := strings.Cut(strings.TrimSpace(item), ":")
		slots := 0
		if said {
			var err error
			if slots, err = strconv.Atoi(number); err != nil || slots < 1 || slots > maxSlots {
				return nil, fmt.Errorf("host %q: what follows the colon must be a number of ranks, from 1 to %d", item,
					maxSlots)
			}
		}
		var err error
		if hosts, err = addHost(hosts, name, slots); err != nil {
			return nil, err
		}
	}
	return hosts, nil
}

// ReadHosts reads a file with a host a line: "a", "a:4" or "a slots=4", as hostfiles of Open MPI
// and MPICH and nodefiles of PBS have them. A name that comes again has room for one more rank.
// What follows a # is a comment.
func ReadHosts(path string) ([]Host, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var hosts []Host
	lines := bufio.NewScanner(bytes.NewReader(text))
	for number := 1; lines.Scan(); number++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		name, slots, said := strings.Cut(fields[0], ":")
		for _, field := range fields[1:] {
			if after, ok := strings.CutPrefix(field, "slots="); ok {
				slots = after
			}
		}
		n := 0
		if said || slots != "" {
			if n, err = strconv.Atoi(slots); err != nil || n < 1 || n > maxSlots {
				return nil, fmt.Errorf("%s, line %d: %q is not a number of ranks, from 1 to %d", path, number, slots,
					maxSlots)
			}
		}
		if hosts, err = addHost(hosts, name, n); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", path, number, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(hosts) == 0 {
		return nil, fmt.Errorf("%s names no host", path)
	}
	return hosts, nil
}

// addHost adds a host to a list, or room to one that is there.
func addHost(hosts []Host, name string, slots int) ([]Host, error) {
	// A name goes into the command lines of ssh and mpiexec, where one that begins with a dash
	// would be an option.
	if name == "" || strings.HasPrefix(name, "-") || strings.ContainsFunc(name, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._@", r)
	}) {
		return nil, fmt.Errorf("%q is not the name of a host: letters, digits, dots, dashes, not a dash first", name)
	}
	i := slices.IndexFunc(hosts, func(h Host) bool { return h.Name == name })
	if i < 0 {
		return append(hosts, Host{name, slots}), nil
	}
	hosts[i].Slots = max(hosts[i].Slots, 1) + max(slots, 1)
	return hosts, nil
}

// ParseNodeList reads a list of nodes in Slurm's form, as in "nid[001-003,007],login1".
func ParseNodeList(text string) ([]Host, error) {
	var hosts []Host
	for rest := text; rest != ""; {
		item := rest
		depth := 0
		for i, r := range rest {
			switch {
			case r == '[':
				depth++
			case r == ']':
				depth--
			case r == ',' && depth == 0:
				item = rest[:i]
			}
			if len(item) < len(rest) {
				break
			}
		}
		rest = strings.TrimPrefix(rest[len(item):], ",")
		names, err := expand(item)
		if err != nil {
			return nil, fmt.Errorf("nodes %q: %w", text, err)
		}
		for _, name := range names {
			if hosts, err = addHost(hosts, name, 0); err != nil {
				return nil, fmt.Errorf("nodes %q: %w", text, err)
			}
		}
	}
	return hosts, nil
}

// expand writes out the ranges in brackets of a name, the first of them slowest.
func expand(item string) ([]string, error) {
	open := strings.IndexByte(item, '[')
	if open < 0 {
		return []string{item}, nil
	}
	length := strings.IndexByte(item[open:], ']')
	if length < 0 {
		return nil, fmt.Errorf("%q has a bracket that is not closed", item)
	}
	tails, err := expand(item[open+length+1:])
	if err != nil {
		return nil, err
	}
	var names []string
	for _, part := range strings.Split(item[open+1:open+length], ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 31)
		to, err2 := strconv.ParseUint(last, 10, 31)
		if err1 != nil || err2 != nil || from > to || to-from >= maxSlots {
			return nil, fmt.Errorf("%q is not a range of numbers", part)
		}
		for n := from; n <= to; n++ {
			for _, tail := range tails {
				names = append(names, fmt.Sprintf("%s%0*d%s", item[:open], len(first), n, tail))
			}
		}
	}
	return names, nil
}

// Distribute completes a list of hosts, of which the last are to be spares: those that do not say
// how many ranks they have room for get as many as ranks needs on the hosts before the spares, all
// alike. Ranks 0 stands for as many as the hosts before the spares have room for.
func Distribute(hosts []Host, spares, ranks int) ([]Host, int, error) {
	if spares < 0 || spares >= len(hosts) {
		return nil, 0, fmt.Errorf("%d spares of %d hosts; at least one host must be left to run on", spares, len(hosts))
	}
	used := len(hosts) - spares
	unsaid, room := 0, 0
	for _, h := range hosts[:used] {
		room += h.Slots
		if h.Slots == 0 {
			unsaid++
		}
	}
	each := 1
	if ranks > room && unsaid > 0 {
		each = (ranks - room + unsaid - 1) / unsaid
	}
	hosts = slices.Clone(hosts)
	for i := range hosts {
		if hosts[i].Slots == 0 {
			hosts[i].Slots = each
		}
	}
	room += unsaid * each
	if ranks == 0 {
		ranks = room
	}
	if ranks > room {
		return nil, 0, fmt.Errorf("%d ranks do not fit on %d hosts with room for %d and %d spares", ranks, used, room,
			spares)
	}
	return hosts, ranks, nil
}

// A pool is the hosts of a run, and what is held against them.
type pool struct {
	hosts []Host
	// hosts on which a rank was killed, from the first to the last: they are used when no other is
	// left
	suspects []string
	lost     map[string]string // why a host is not used any more
}

func newPool(hosts []Host) *pool { return &pool{hosts: hosts, lost: map[string]string{}} }

// place gives each rank a host: the hosts in their order, suspects after all others, and of them
// the one whose last death is longest ago first. Without a list of hosts, all ranks run here. If
// there is not enough room it returns nil and the room that there is.
func (p *pool) place(ranks int) (hosts []string, room int) {
	if len(p.hosts) == 0 {
		return slices.Repeat([]string{"localhost"}, ranks), ranks
	}
	usable := slices.DeleteFunc(slices.Clone(p.hosts), func(h Host) bool { return p.lost[h.Name] != "" })
	slices.SortStableFunc(usable,
		func(a, b Host) int { return slices.Index(p.suspects, a.Name) - slices.Index(p.suspects, b.Name) })
	for _, h := range usable {
		room += h.Slots
		for range h.Slots {
			if len(hosts) < ranks {
				hosts = append(hosts, h.Name)
			}
		}
	}
	if len(hosts) < ranks {
		return nil, room
	}
	return hosts, room
}

// suspect notes that a rank died on a host, which may have been the host's fault.
func (p *pool) suspect(host string) {
	if !p.has(host) {
		return
	}
	p.suspects = append(slices.DeleteFunc(p.suspects, func(s string) bool { return s == host }), host)
}

// lose takes a host out of use, and reports whether it was in use.
func (p *pool) lose(host, why string) bool {
	if !p.has(host) || p.lost[host] != "" {
		return false
	}
	p.lost[host] = why
	return true
}

// forgive takes a host into use again.
func (p *pool) forgive(host string) { delete(p.lost, host) }

func (p *pool) has(host string) bool {
	return slices.ContainsFunc(p.hosts, func(h Host) bool { return h.Name == host })
}

// lostNames are the hosts that are not used any more, in their order.
func (p *pool) lostNames() []string {
	names := []string{}
	for _, h := range p.hosts {
		if p.lost[h.Name] != "" {
			names = append(names, h.Name)
		}
	}
	return names
}

// lostText says why hosts are not used any more.
func (p *pool) lostText() string {
	var parts []string
	for _, name := range p.lostNames() {
		parts = append(parts, fmt.Sprintf("%s is out of use (%s)", name, p.lost[name]))
	}
	if parts == nil {
		return "all are in use"
	}
	return strings.Join(parts, ", ")
}
