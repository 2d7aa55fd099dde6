package torchfile

import (
	"archive/zip"
	"fmt"
	"io"
	"slices"
	"strconv"

	"mula/internal/atomicfile"
	"mula/internal/pickle"
	"mula/moe/safetensors"
)

// Contents are a tensor of a file that [WriteFile] writes.
type Contents struct {
	DType safetensors.DType // F32 or BF16
	Shape []int

	// Each passes all elements to put in their order, in one or several chunks. An element that
	// DType does not have is rounded to nearest, ties to even.
	Each func(put func(chunk []float32) error) error
}

// Elements returns the number of elements.
func (c *Contents) Elements() int64 { return (&Tensor{Shape: c.Shape}).Elements() }

// Scalar returns a float32 tensor without axes.
func Scalar(x float32) *Contents {
	return &Contents{DType: safetensors.F32, Each: func(put func([]float32) error) error {
		return put([]float32{x})
	}}
}

func tuple(ints []int) pickle.Tuple {
	t := pickle.Tuple{}
	for _, n := range ints {
		t = append(t, int64(n))
	}
	return t
}

// WriteFile writes a file of torch.save with the object root, which may contain [Contents]. The
// file appears complete or not at all. Tensors are written one after another, and none is in memory
// as a whole. Each of them has its own storage.
func WriteFile(path string, root pickle.Value) error {
	f, err := atomicfile.Create(path)
	if err != nil {
		return err
	}
	defer f.Abort()
	if err := Write(f, root); err != nil {
		return err
	}
	return f.Publish()
}

// Write writes the bytes of [WriteFile] to w, which may have other bytes before them.
func Write(w io.Writer, root pickle.Value) error {
	var tensors []*Contents
	data, err := pickle.Write(root, func(v pickle.Value) (pickle.Value, error) {
		c, ok := v.(*Contents)
		if !ok {
			return nil, fmt.Errorf("a pickle of a %T is not supported", v)
		}
		tensors = append(tensors, c)
		return rebuilt(c, len(tensors)-1)
	})
	if err != nil {
		return err
	}
	archive := zip.NewWriter(w)
	for _, member := range []struct {
		name    string
		content []byte
	}{{"data.pkl", data}, {"byteorder", []byte("little")}, {"version", []byte("3\n")}} {
		out, err := create(archive, member.name)
		if err != nil {
			return err
		}
		if _, err := out.Write(member.content); err != nil {
			return err
		}
	}
	for i, c := range tensors {
		out, err := create(archive, "data/"+strconv.Itoa(i))
		if err != nil {
			return err
		}
		if err := c.write(out); err != nil {
			return err
		}
	}
	return archive.Close()
}

func create(archive *zip.Writer, name string) (io.Writer, error) {
	return archive.CreateHeader(&zip.FileHeader{Name: "archive/" + name, Method: zip.Store})
}

// rebuilt returns the call that makes a tensor of storage number key.
func rebuilt(c *Contents, key int) (pickle.Value, error) {
	for class, dtype := range storages {
		if dtype != c.DType || dtype != safetensors.F32 && dtype != safetensors.BF16 {
			continue
		}
		id := pickle.Tuple{"storage", class, strconv.Itoa(key), "cpu", c.Elements()}
		strides := make([]int, len(c.Shape))
		stride := 1
		for i, d := range slices.Backward(c.Shape) {
			strides[i] = stride
			stride *= d
		}
		hooks := &pickle.Object{Class: "collections.OrderedDict"}
		return &pickle.Object{Class: rebuildTensor, Args: pickle.Tuple{pickle.PersistentID{ID: id}, int64(0),
			tuple(c.Shape), tuple(strides), false, hooks}}, nil
	}
	return nil, fmt.Errorf("a tensor of type %q is not supported", c.DType)
}

// write writes all elements.
func (c *Contents) write(w io.Writer) error {
	size := c.DType.Size()
	left := c.Elements()
	var buffer []byte
	err := c.Each(func(chunk []float32) error {
		if left -= int64(len(chunk)); left < 0 {
			return fmt.Errorf("a tensor of shape %v gets too many elements", c.Shape)
		}
		for len(chunk) > 0 {
			n := min(len(chunk), 1<<18)
			buffer = slices.Grow(buffer[:0], n*size)[:n*size]
			safetensors.Encode(buffer, chunk[:n], c.DType)
			if _, err := w.Write(buffer); err != nil {
				return err
			}
			chunk = chunk[n:]
		}
		return nil
	})
	if err == nil && left > 0 {
		err = fmt.Errorf("a tensor of shape %v gets %d elements too few", c.Shape, left)
	}
	return err
}
