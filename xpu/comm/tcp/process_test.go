package tcp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"mula/xpu/comm"
	"mula/xpu/comm/transporttest"
)

// The test binary starts itself for ranks that are processes; roleVariable selects the test.
const (
	roleVariable   = "MULA_TEST_TCP_ROLE"
	folderVariable = "MULA_TEST_TCP_FOLDER"
)

func TestMain(m *testing.M) {
	role := os.Getenv(roleVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	os.Exit(play(role))
}

// waitsFor says for which rank each of four waits; none for rank 2, which dies.
var waitsFor = [4]int{1, 3, 3, 0}

// play is a rank of another process. It prints what is wrong.
func play(role string) int {
	o, _, err := FromEnvironment()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	transport, err := Join(context.Background(), o)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	code := 0
	switch role {
	case "checks":
		transporttest.Each(transport, os.Getenv(folderVariable), func(name string, err error) {
			fmt.Printf("%s: rank %d: %v\n", name, transport.Rank(), err)
			code = 1
		})
	case "waits":
		err := transport.Recv(context.Background(), waitsFor[transport.Rank()], make([]byte, 1)) // never sent
		fmt.Println(err)
		if !errors.Is(err, comm.ErrPeerLost) {
			return 1
		}
		transport.Close()
	}
	return code
}

// processes starts all ranks but 0 as processes, and returns the transport of rank 0.
func processes(t *testing.T, size int, role, folder string) (comm.Transport, []*exec.Cmd, []*strings.Builder) {
	t.Helper()
	listener := listen(t)
	o := Options{Address: listener.Addr().String(), Size: size, Secret: "s3cret"}
	commands, outputs := make([]*exec.Cmd, size), make([]*strings.Builder, size)
	for r := 1; r < size; r++ {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), roleVariable+"="+role, folderVariable+"="+folder,
			fmt.Sprintf("%s=%d", RankVariable, r),
			fmt.Sprintf("%s=%d", SizeVariable, size), AddressVariable+"="+o.Address, SecretVariable+"="+o.Secret)
		outputs[r] = new(strings.Builder)
		cmd.Stdout, cmd.Stderr = outputs[r], outputs[r]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		commands[r] = cmd
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	transport, err := join(ctx, o, listener)
	if err != nil {
		t.Fatal(err)
	}
	return transport, commands, outputs
}

func TestProcesses(t *testing.T) {
	folder := t.TempDir()
	transport, commands, outputs := processes(t, 3, "checks", folder)
	transporttest.Each(transport, folder, func(name string, err error) { t.Errorf("%s: rank 0: %v", name, err) })
	for r := 1; r < len(commands); r++ {
		if err := commands[r].Wait(); err != nil {
			t.Errorf("rank %d: %v\n%s", r, err, outputs[r])
		}
	}
}

// A rank that is killed is named to all that wait, for whomever they wait, and whatever they do
// afterwards.
func TestKilledProcess(t *testing.T) {
	transport, commands, outputs := processes(t, 4, "waits", "")
	var waiting sync.WaitGroup
	waiting.Go(func() {
		for range 2 {
			err := transport.Recv(context.Background(), waitsFor[0], make([]byte, 1))
			if !errors.Is(err, comm.ErrPeerLost) || !strings.Contains(err.Error(), "rank 2 ") {
				t.Errorf("rank 0: %v", err)
			}
		}
	})
	if err := commands[2].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	waiting.Wait()
	for r := 1; r < len(commands); r++ {
		err := commands[r].Wait()
		if r != 2 && (err != nil || !strings.Contains(outputs[r].String(), "rank 2 ")) {
			t.Errorf("rank %d: %v\n%s", r, err, outputs[r])
		}
	}
	transport.Close()
}
