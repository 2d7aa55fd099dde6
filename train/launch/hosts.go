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
	Slots int // ranks that fit on the host; 0: not specified
}

// maxSlots is more ranks than a host can have.
const maxSlots = 1 << 16

// ParseHosts reads a list such as "a,b:4,c": names with numbers of slots. The slots of a repeated
// name are added.
func ParseHosts(text string) ([]Host, error) {
	var hosts []Host
	for _, item := range strings.Split(text, ",") {
		name, number, said := strings.Cut(strings.TrimSpace(item), ":")
		slots := 0
		if said {
			var err error
			if slots, err = strconv.Atoi(number); err != nil || slots < 1 || slots > maxSlots {
				return nil, fmt.Errorf("host %q: the text after the colon must be a number of ranks from 1 to %d", item,
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

// ReadHosts reads a file with one host per line: "a", "a:4" or "a slots=4", as in hostfiles of Open
// MPI and MPICH and in nodefiles of PBS. Each repetition of a name adds a slot. A # starts a
// comment.
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
				return nil, fmt.Errorf("%s:%d: %q is not a number of ranks from 1 to %d", path, number, slots,
					maxSlots)
			}
		}
		if hosts, err = addHost(hosts, name, n); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(hosts) == 0 {
		return nil, fmt.Errorf("%s: the file names no host", path)
	}
	return hosts, nil
}

// addHost adds a host to a list, or slots to a host in the list.
func addHost(hosts []Host, name string, slots int) ([]Host, error) {
	// ssh and mpiexec would read a name that starts with a dash as an option.
	if name == "" || strings.HasPrefix(name, "-") || strings.ContainsFunc(name, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._@", r)
	}) {
		return nil, fmt.Errorf("%q is not the name of a host; use letters, digits, dots and dashes, "+
			"and do not start with a dash", name)
	}
	i := slices.IndexFunc(hosts, func(h Host) bool { return h.Name == name })
	if i < 0 {
		return append(hosts, Host{name, slots}), nil
	}
	hosts[i].Slots = max(hosts[i].Slots, 1) + max(slots, 1)
	return hosts, nil
}

// ParseNodeList reads a list of nodes in Slurm's form, such as "nid[001-003,007],login1".
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

// expand returns the names for the ranges in the brackets of a name. The first range varies
// slowest.
func expand(item string) ([]string, error) {
	open := strings.IndexByte(item, '[')
	if open < 0 {
		return []string{item}, nil
	}
	length := strings.IndexByte(item[open:], ']')
	if length < 0 {
		return nil, fmt.Errorf("%q has an unclosed bracket", item)
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

// Distribute sets the slots of hosts that have none. The last hosts of the list are spares. Hosts
// without slots get equal numbers, so that the hosts before the spares have enough for all ranks.
// If ranks is 0, Distribute uses all slots of the hosts before the spares. It returns the hosts and
// the number of ranks.
func Distribute(hosts []Host, spares, ranks int) ([]Host, int, error) {
	if spares < 0 || spares >= len(hosts) {
		return nil, 0, fmt.Errorf("%d of %d hosts are spares; at least one host must not be a spare", spares,
			len(hosts))
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
		return nil, 0, fmt.Errorf("%d ranks do not fit on %d hosts with %d slots and %d spares", ranks, used, room,
			spares)
	}
	return hosts, ranks, nil
}

// A pool is the hosts of a run and their failures.
type pool struct {
	hosts []Host
	// hosts on which a rank was killed or hung, the oldest failure first; used when no other host
	// is left
	suspects []string
	lost     map[string]string // why a host is out of use
}

func newPool(hosts []Host) *pool { return &pool{hosts: hosts, lost: map[string]string{}} }

// place assigns a host to each rank: the hosts in their order, then suspects, the oldest failure
// first. Without a list of hosts, all ranks run here. If slots are missing, place returns nil and
// the number of slots.
func (p *pool) place(ranks int) (hosts []string, room int) {
	if len(p.hosts) == 0 {
		return slices.Repeat([]string{localhost}, ranks), ranks
	}
	for _, h := range p.usable() {
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

// usable returns the hosts that are in use, in the order in which ranks are placed.
func (p *pool) usable() []Host {
	usable := slices.DeleteFunc(slices.Clone(p.hosts), func(h Host) bool { return p.lost[h.Name] != "" })
	slices.SortStableFunc(usable,
		func(a, b Host) int { return slices.Index(p.suspects, a.Name) - slices.Index(p.suspects, b.Name) })
	return usable
}

// free returns the hosts of at most n free slots, in the order of place. used has a host for each
// slot in use. Without a list of hosts, this machine has any number of slots.
func (p *pool) free(used []string, n int) (hosts []string) {
	if len(p.hosts) == 0 {
		return slices.Repeat([]string{localhost}, n)
	}
	for _, h := range p.usable() {
		slots := h.Slots
		for _, name := range used {
			if name == h.Name {
				slots--
			}
		}
		hosts = append(hosts, slices.Repeat([]string{h.Name}, max(slots, 0))...)
	}
	return hosts[:min(n, len(hosts))]
}

// replaceable reports whether other hosts have enough slots if a host is taken out of use.
func (p *pool) replaceable(host string, ranks int) bool {
	if !p.has(host) || p.lost[host] != "" {
		return false
	}
	room := 0
	for _, h := range p.hosts {
		if h.Name != host && p.lost[h.Name] == "" {
			room += h.Slots
		}
	}
	return room >= ranks
}

// HasSpare reports whether the hosts have enough slots for all ranks without one of the hosts.
func HasSpare(hosts []Host, ranks int) bool {
	p := newPool(hosts)
	return slices.ContainsFunc(hosts, func(h Host) bool { return p.replaceable(h.Name, ranks) })
}

// suspect records that a rank died or hung on a host. The host may be the cause.
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

// forgive uses a host again.
func (p *pool) forgive(host string) { delete(p.lost, host) }

func (p *pool) has(host string) bool {
	return slices.ContainsFunc(p.hosts, func(h Host) bool { return h.Name == host })
}

// lostNames returns the hosts that are out of use, in their order.
func (p *pool) lostNames() []string {
	names := []string{}
	for _, h := range p.hosts {
		if p.lost[h.Name] != "" {
			names = append(names, h.Name)
		}
	}
	return names
}

// lostText describes why hosts are out of use.
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
