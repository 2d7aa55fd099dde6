package job

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"mula/tokenize"
	"fmt"
	"bufio"
	"strings"
	"math/rand"
)

func TestZZ(t *testing.T) {
	dir := t.TempDir()
	tok, err := tokenize.Load("/work/shared/tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json")
	if err != nil {
		t.Fatal(err)
	}
	var in []string
	words := strings.Fields("the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one you were all her she there would their we him been has when who will no more if out so up said what its about than into them can only other time new some could these two may first then do any like my now over such our man me even most made after also did many before must through years where much your way well down should because long state good very make world still own see men work here get both between life being under day american us")
	rng := rand.New(rand.NewSource(1))
	for f := range 4 {
		path := filepath.Join(dir, fmt.Sprintf("part-%04d.jsonl", f))
		file, _ := os.Create(path)
		w := bufio.NewWriter(file)
		for d := range 12000 {
			fmt.Fprintf(w, `{"id":"%032x","text":"`, uint64(f)<<32|uint64(d)*0x9e3779b97f4a7c15)
			for range 1300 {
				w.WriteString(words[rng.Intn(len(words))])
				w.WriteByte(' ')
			}
			w.WriteString("\"}\n")
		}
		w.Flush()
		file.Close()
		in = append(in, path)
	}
	_, err = Run(context.Background(), Options{Tokenizer: tok, AppendEOD: true, EOD: 0, Inputs: in, Output: filepath.Join(dir, "out")})
	if err != nil {
		t.Fatal(err)
	}
}
