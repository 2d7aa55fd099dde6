package megatron

import (
	"testing"

	"mula/index/python"
)

func TestHuggingFaceTokenizer(t *testing.T) {
	const class = `{"class": "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText", "tokenizer_path": "/t"`
	const files = `, "vocab_file": "None", "merges_file": "None"`
	const legacy = `{"class": "_HuggingFaceTokenizer", "tokenizer_path": ["/t"]}`
	off := `, "additional_special_tokens": "[]", "use_fast": "False", "trust_remote_code": "False", "include_special_tokens": "False"}`
	on := `, "additional_special_tokens": "[]", "use_fast": "True", "trust_remote_code": "False", "include_special_tokens": "True"}`
	for _, c := range []struct {
		release string
		legacy  bool
		want    string // "" if there is none
	}{
		{"core-0.4", false, ""},
		{"core-0.5", false, legacy},
		{"core-0.14", false, legacy},
		{"core-0.15", true, legacy},
		{"core-0.16", true, legacy},
		{"core-0.15", false, class + files + "}"},
		{"core-0.16", false, class + files + off},
		{"core-0.17", false, class + files + on},
		{"core-0.17", true, ""},
		{"core-0.18", false, class + `, "chat_template": "None"` + files + on},
		{"core-0.19", false, class + `, "chat_template": "None"` + files + on},
		{"core-main", false, ""},
	} {
		got, err := HuggingFaceTokenizer(c.release, "/t", c.legacy)
		if c.want == "" {
			if err == nil {
				t.Errorf("%s, legacy %v: %v, want an error", c.release, c.legacy, got)
			}
			continue
		}
		want, wantErr := python.Parse([]byte(c.want))
		if err != nil || wantErr != nil || python.Dumps(got) != python.Dumps(want) {
			t.Errorf("%s, legacy %v: %s, %v, %v", c.release, c.legacy, python.Dumps(got), err, wantErr)
		}
	}
}
