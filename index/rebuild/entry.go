package rebuild

// An Entry is one dataset or blend of a configuration: the files that the framework will look for,
// and where.
type Entry struct {
	Class    string   // the framework's name of the dataset or blend
	Name     string   // for people
	Splits   []Split  // several if splits of the same size share the entry
	Prefixes []string // of the token files; of a blend of corpora, the names of the corpora
	Samples  int64    // requested; -1: one epoch of a dataset, all samples of a blend
	Hash     string

	// Dir is the directory of the files. It is empty for a blend if no cache directory is
	// configured: the framework then computes the blend at every start and does not store it.
	Dir         string
	Description string   // the name of the file that holds Text
	Files       []string // the names of the data files
	Text        string   // the description

	Length int64   // number of samples; -1 if it is not counted
	Sizes  []int64 // sizes of Files in bytes, in that order; nil if they are not counted

	// Shadow is a directory other than Dir that has files with these names and that the framework
	// searches before Dir. The framework uses those files whether or not they are correct. Empty if
	// there is no such directory.
	Shadow string
}

// DatasetClass is the class of the index of one split of one token file, in all frameworks.
const DatasetClass = "GPTDataset"

// Bytes returns the total size of the data files.
func (e *Entry) Bytes() (n int64) {
	for _, size := range e.Sizes {
		n += size
	}
	return n
}
