package collective

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"mula/xpu/comm"
)

// Decide sends the questions of all ranks to rank 0, which computes an answer for each of them, and
// returns the answer to this rank's question. Rank 0 calls decide with all questions, in the order
// of the ranks. If decide fails, or an answer cannot be sent, all ranks return the error.
//
// Unlike [Gather], a rank receives only its own answer. The first rank of each section of about √n
// ranks also relays the questions and answers of its section, and rank 0 receives all questions in
// about 2·√n messages. Questions and answers are JSON.
func Decide[Q, A any](ctx context.Context, world *comm.Comm, question Q,
	decide func(questions []Q) ([]A, error)) (answer A, err error) {
	type reply struct {
		Answer A      `json:"answer"`
		Error  string `json:"error,omitempty"`
	}
	text, encodeErr := json.Marshal(question)
	if encodeErr != nil {
		text = nil // which rank 0 reports as an invalid message
	}
	texts, err := collect(ctx, world, text)
	if err != nil {
		return answer, errors.Join(encodeErr, err)
	}
	var replies [][]byte
	var decideErr error
	if world.Rank() == 0 {
		questions := make([]Q, len(texts))
		for r, text := range texts {
			if e := json.Unmarshal(text, &questions[r]); e != nil && decideErr == nil {
				decideErr = fmt.Errorf("invalid message from rank %d: %w", r, e)
			}
		}
		var answers []A
		if decideErr == nil {
			answers, decideErr = decide(questions)
		}
		for r := 0; r < len(answers) && decideErr == nil; r++ {
			text, decideErr = json.Marshal(reply{Answer: answers[r]})
			replies = append(replies, text)
		}
		if decideErr != nil {
			text, _ := json.Marshal(reply{Error: decideErr.Error()}) // a text always has JSON
			replies = slices.Repeat([][]byte{text}, len(texts))
		}
	}
	text, err = distribute(ctx, world, replies)
	if err != nil || decideErr != nil || encodeErr != nil {
		return answer, errors.Join(encodeErr, OfAll(world, decideErr), err)
	}
	var own reply
	if err := json.Unmarshal(text, &own); err != nil {
		return answer, fmt.Errorf("invalid message from rank 0: %w", err)
	}
	if own.Error != "" {
		return answer, OfAll(world, errors.New(own.Error))
	}
	return own.Answer, nil
}

// Section returns the number of ranks in a section of n ranks, which is ⌈√n⌉. The last section may
// have fewer. The first rank of a section relays the messages of the section, so that no rank sends
// or receives n messages.
func Section(n int) int {
	section := 1
	for section*section < n {
		section++
	}
	return section
}

// collect returns the texts of all ranks on rank 0, in order, and nil on other ranks. The ranks of
// a section send their texts to its first rank, which sends them to rank 0.
func collect(ctx context.Context, world *comm.Comm, text []byte) ([][]byte, error) {
	n, own, section := world.Size(), world.Rank(), Section(world.Size())
	first := own - own%section
	if own != first {
		return nil, send(ctx, world, first, [][]byte{text})
	}
	texts := [][]byte{text}
	receive := func(from int) error {
		more, err := receive(ctx, world, from)
		texts = append(texts, more...)
		return err
	}
	for other := first + 1; other < min(first+section, n); other++ {
		if err := receive(other); err != nil {
			return nil, err
		}
	}
	if first > 0 {
		return nil, send(ctx, world, 0, texts)
	}
	for head := section; head < n; head += section {
		if err := receive(head); err != nil {
			return nil, err
		}
	}
	if len(texts) != n {
		return nil, fmt.Errorf("%d messages of %d ranks", len(texts), n)
	}
	return texts, nil
}

// distribute is the inverse of collect: it returns on each rank its text of the texts of rank 0.
func distribute(ctx context.Context, world *comm.Comm, texts [][]byte) ([]byte, error) {
	n, own, section := world.Size(), world.Rank(), Section(world.Size())
	first := own - own%section
	var err error
	switch {
	case own != first:
		texts, err = receive(ctx, world, first)
	case own > 0:
		texts, err = receive(ctx, world, 0)
	default:
		for head := section; head < n; head += section {
			if err := send(ctx, world, head, texts[head:min(head+section, n)]); err != nil {
				return nil, err
			}
		}
	}
	if err != nil {
		return nil, err
	}
	if own == first {
		for other := first + 1; other < min(first+section, n); other++ {
			if err := send(ctx, world, other, texts[other-first:other-first+1]); err != nil {
				return nil, err
			}
		}
	}
	return texts[0], nil
}

// send sends texts to another rank: the number of bytes of the message, and the message. It has the
// length of each text, as 8 bytes, and the text.
func send(ctx context.Context, world *comm.Comm, to int, texts [][]byte) error {
	var message []byte
	for _, text := range texts {
		message = append(binary.LittleEndian.AppendUint64(message, uint64(len(text))), text...)
	}
	if err := comm.Send(ctx, world, to, []int64{int64(len(message))}); err != nil {
		return err
	}
	return comm.Send(ctx, world, to, message)
}

// receive returns the texts that another rank sends.
func receive(ctx context.Context, world *comm.Comm, from int) ([][]byte, error) {
	length := make([]int64, 1)
	if err := comm.Recv(ctx, world, from, length); err != nil {
		return nil, err
	}
	message := make([]byte, length[0])
	if err := comm.Recv(ctx, world, from, message); err != nil {
		return nil, err
	}
	var texts [][]byte
	for len(message) >= 8 {
		n := binary.LittleEndian.Uint64(message)
		if message = message[8:]; n > uint64(len(message)) {
			break
		}
		texts, message = append(texts, message[:n]), message[n:]
	}
	if len(message) > 0 {
		return nil, fmt.Errorf("invalid message from rank %d", from)
	}
	return texts, nil
}
