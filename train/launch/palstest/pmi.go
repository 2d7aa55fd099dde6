//go:build unix

package palstest

import (
	"fmt"
	"strings"
)

// A pmiServer answers the ranks of an application in the protocol PMI 1, with which MPI libraries
// exchange their addresses.
type pmiServer struct {
	size, each, hosts int
	values            map[string]string
	atBarrier         []int // ranks
}

// answer returns the answers to a line of a rank, by rank.
func (p *pmiServer) answer(rank int, line string) map[int]string {
	fields := map[string]string{}
	for _, word := range strings.Fields(line) {
		name, value, _ := strings.Cut(word, "=")
		fields[name] = value
	}
	one := func(format string, arguments ...any) map[int]string {
		return map[int]string{rank: fmt.Sprintf(format, arguments...)}
	}
	switch fields["cmd"] {
	case "init":
		return one("cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0")
	case "get_maxes":
		return one("cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024")
	case "get_appnum":
		return one("cmd=appnum appnum=0")
	case "get_universe_size":
		return one("cmd=universe_size size=%d", p.size)
	case "get_my_kvsname":
		return one("cmd=my_kvsname kvsname=kvs_0")
	case "put":
		p.values[fields["key"]] = fields["value"]
		return one("cmd=put_result rc=0 msg=success")
	case "get":
		value, ok := p.values[fields["key"]]
		if fields["key"] == "PMI_process_mapping" { // all ranks of a host, host by host
			value, ok = fmt.Sprintf("(vector,(0,%d,%d))", p.hosts, p.each), true
		}
		if !ok {
			return one("cmd=get_result rc=-1 msg=key_%s_not_found value=unknown", fields["key"])
		}
		return one("cmd=get_result rc=0 msg=success value=%s", value)
	case "barrier_in":
		p.atBarrier = append(p.atBarrier, rank)
		answers := map[int]string{}
		if len(p.atBarrier) == p.size {
			for _, rank := range p.atBarrier {
				answers[rank] = "cmd=barrier_out rc=0"
			}
			p.atBarrier = nil
		}
		return answers
	case "finalize":
		return one("cmd=finalize_ack rc=0")
	}
	return nil // such as abort: the rank ends
}
