package megatron

import (
	"fmt"

	"mula/index/python"
)

// HuggingFaceTokenizer returns the object that a release of Megatron ("core-0.14", …) hashes for
// --tokenizer-type HuggingFaceTokenizer with --tokenizer-model path and no other option about
// tokenizers. legacy is --legacy-tokenizer, an option of 0.15 and 0.16.
//
// The object does not affect the contents of the indices, but nearly every release changed it, and
// all file names with it. It is safer to copy the object from an existing description of the same
// training; see [likeDescription].
func HuggingFaceTokenizer(release, path string, legacy bool) (python.Value, error) {
	text := func(key, value string) python.Member { return python.Member{Key: key, Value: python.String(value)} }
	switch release {
	case "core-0.4":
		return nil, fmt.Errorf("descriptions of %s have no tokenizer; remove it", release)
	case "core-0.5", "core-0.6", "core-0.7", "core-0.8", "core-0.9", "core-0.10", "core-0.11", "core-0.12", "core-0.13",
		"core-0.14":
		legacy = true
	case "core-0.15", "core-0.16":
	case "core-0.17", "core-0.18", "core-0.19":
		if legacy {
			return nil, fmt.Errorf("%s has no legacy tokenizers; the last release with them is core-0.16", release)
		}
	default:
		return nil, fmt.Errorf("the tokenizer object of release %q is unknown; take it from a description.txt that "+
			"this Megatron wrote, or use one of core-0.5 to core-0.19", release)
	}
	if legacy {
		return python.Object{text("class", "_HuggingFaceTokenizer"),
			{Key: "tokenizer_path", Value: python.List{python.String(path)}}}, nil
	}

	o := python.Object{
		text("class", "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"),
		text("tokenizer_path", path),
	}
	if release == "core-0.18" || release == "core-0.19" {
		o = append(o, text("chat_template", "None"))
	}
	o = append(o, text("vocab_file", "None"), text("merges_file", "None"))
	if release == "core-0.15" {
		return o, nil
	}
	flags := "True"
	if release == "core-0.16" {
		flags = "False" // it passed the options unchanged, later releases pass their negations
	}
	return append(o, text("additional_special_tokens", "[]"), text("use_fast", flags),
		text("trust_remote_code", "False"), text("include_special_tokens", flags)), nil
}
