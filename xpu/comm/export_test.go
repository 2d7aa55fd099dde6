package comm

// NewSingleTransport returns the transport of [NewSingle].
func NewSingleTransport() Transport { return new(single) }
