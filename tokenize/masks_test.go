package tokenize

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
	"unicode/utf8"
)

// The masks assume these about the first bytes of characters.
func TestUniformFirstBytes(t *testing.T) {
	classes := pinnedClasses()
	caseless, cyrillic := 0, 0
	for r := rune(0x80); r <= utf8.MaxRune; r++ {
		if !utf8.ValidRune(r) {
			continue
		}
		s := utf8.AppendRune(nil, r)
		k, _ := classes.of(s)
		switch c := s[0]; {
		case 0xe5 <= c && c <= 0xe8 || 0xeb <= c && c <= 0xec:
			caseless++
			if k != lo {
				t.Errorf("%U is not of Lo", r)
			}
		case c == 0xd0 || c == 0xd1:
			cyrillic++
			if !k.in(letter) {
				t.Errorf("%U is not a letter", r)
			}
		}
	}
	if caseless != 6*4096 || cyrillic != 128 {
		t.Errorf("%d and %d characters were tested", caseless, cyrillic)
	}
}

// randomBytes are bytes of all values, mostly ASCII in some blocks.
func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
		if i/maskedBytes%3 == 0 {
			b[i] &= 0x7f
		}
	}
	return b
}

func TestMasks(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const blocks = 6
	for range 2000 {
		text := randomBytes(r, blocks*maskedBytes)
		var want [blocks]masks
		wantBeyond := maskASCIIGo(want[:], text)
		for i := range want {
			var m masks // by the definition of each
			for k, c := range text[i*maskedBytes : (i+1)*maskedBytes] {
				bit := uint64(1) << k
				set := func(mask *uint64, in bool) {
					if in {
						*mask |= bit
					}
				}
				set(&m.capitals, 'A' <= c && c <= 'Z')
				set(&m.smalls, 'a' <= c && c <= 'z')
				set(&m.numbers, '0' <= c && c <= '9')
				set(&m.spaces, c == ' ' || '\t' <= c && c <= '\r')
				set(&m.breaks, isLineBreak(c))
				set(&m.blanks, c == ' ')
				set(&m.quotes, c == '\'')
				set(&m.slashes, c == '/')
				set(&m.beyond, c >= utf8.RuneSelf)
				set(&m.continued, c&0xc0 == 0x80)
				set(&m.caseless, 0xe5 <= c && c <= 0xe8 || 0xeb <= c && c <= 0xec)
				set(&m.cyrillic, c == 0xd0 || c == 0xd1)
			}
			m.letters = m.capitals | m.smalls
			if want[i] != m {
				t.Fatalf("%q:\n got %x\nwant %x", text[i*maskedBytes:(i+1)*maskedBytes], want[i], m)
			}
		}
		eachInstructionSet(t, func(t *testing.T) {
			var got [blocks]masks
			beyond := maskASCII(got[:], text)
			if (beyond != 0) != (wantBeyond != 0) {
				t.Errorf("beyond is %x, want %x", beyond, wantBeyond)
			}
			for i := range got {
				if got[i].beyond == 0 { // undefined
					got[i].continued, got[i].caseless, got[i].cyrillic = 0, 0, 0
				}
				if got[i] != want[i] {
					t.Fatalf("%q:\n got %x\nwant %x", text[i*maskedBytes:(i+1)*maskedBytes], got[i], want[i])
				}
			}
		})
	}
}

func TestValidUTF8(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	valid := 0
	for range 20000 {
		var s []byte
		for range r.IntN(12) {
			s = append(s, randomText(r)...)
		}
		for range r.IntN(3) { // damage
			if len(s) > 0 {
				i := r.IntN(len(s))
				switch r.IntN(3) {
				case 0:
					s[i] = byte(r.Uint32())
				case 1:
					s = s[:i]
				default:
					s = slices.Insert(s, i, byte(0x80+r.IntN(128)))
				}
			}
		}
		want := utf8.Valid(s)
		if want {
			valid++
		}
		eachInstructionSet(t, func(t *testing.T) {
			if got := validUTF8(s); got != want {
				t.Errorf("%q: %v, want %v", s, got, want)
			}
		})
	}
	if valid < 5000 || valid > 15000 {
		t.Errorf("%d of the texts are valid: the test tries too little", valid)
	}
}

// TestValidUTF8Pairs has each pair of bytes at each position of a block, before and after
// characters of each length.
func TestValidUTF8Pairs(t *testing.T) {
	for a := range 256 {
		for b := range 256 {
			for _, around := range []string{"", "é", "€", "\U0001f600", "\xe2\x82", "\xf0\x9f", "\x80"} {
				at := (a*7 + b*13 + len(around)) % 60
				s := bytes.Repeat([]byte("x"), at)
				s = append(append(append(s, around...), byte(a), byte(b)), around...)
				s = append(s, "\x80y and some more text, until the block is full and the next one, too......"...)
				if b%2 == 0 {
					s = append(s[:len(s)-74], s[len(s)-73:]...)
				}
				want := utf8.Valid(s)
				eachInstructionSet(t, func(t *testing.T) {
					if got := validUTF8(s); got != want {
						t.Fatalf("%q: %v, want %v", s, got, want)
					}
				})
			}
		}
	}
}

// TestAddedTokensInAnyPlace compares finding tokens many bytes at a time with a search at each
// byte.
func TestAddedTokensInAnyPlace(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 300 {
		added := &trie{}
		var tokens []string
		for range 1 + r.IntN(20) {
			token := pieces[r.IntN(len(pieces))]
			if r.IntN(2) == 0 {
				token = string(rune('a'+r.IntN(26))) + string(rune('a'+r.IntN(26)))
			}
			tokens = append(tokens, token)
			added.add([]byte(token), addedToken{id: uint32(len(tokens))})
		}
		for range 20 {
			var s []byte
			for range r.IntN(30) {
				if s = append(s, randomText(r)...); r.IntN(4) == 0 {
					s = append(s, tokens[r.IntN(len(tokens))]...)
				}
			}
			from := r.IntN(len(s) + 1)
			start, end, token := 0, 0, addedToken{}
			for i := from; i < len(s) && end == 0; i++ {
				start = i
				end, token = added.match(s, i)
			}
			if end == 0 {
				start = 0
			}
			eachInstructionSet(t, func(t *testing.T) {
				gotStart, gotEnd, gotToken := added.find(s, from)
				if gotStart != start || gotEnd != end || gotToken != token {
					t.Fatalf("%q in %q from %d: found %d at %d to %d, want %d at %d to %d", tokens, s, from,
						gotToken.id, gotStart, gotEnd, token.id, start, end)
				}
			})
		}
	}
}
