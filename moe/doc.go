// Package moe implements decoder-only transformers, dense and with experts: their forward and
// backward passes, and their Hugging Face format.
//
// A family ([Architecture]) is composed of parts and has one file, family_NAME.go. "olmoe" is the
// mixture of experts of https://arxiv.org/abs/2409.02060 (transformers' OlmoeForCausalLM): RMSNorm,
// q/k norm over the whole projected vector, rotate-half RoPE, a router that computes the softmax
// over all experts before choosing the top k and does not renormalise, SwiGLU experts, no dropped
// tokens. The other families are dense, with one SwiGLU feed-forward per layer. They differ in
// their norms, biases, sizes of heads and rotary embeddings.
//
// Numbers are float32. A pass is a sequence of commands to an [xpu.Device], which holds weights,
// gradients and activations in its memory. Only the losses and the router statistics are copied to
// the host, once per pass. The bits of a result do not depend on the number of threads.
//
// Several ranks may share the experts of a model ([NewParallel]): each rank holds a part of the
// experts and all other weights, and processes its own batches. In each layer the hidden states are
// sent to the ranks of the chosen experts and the results are sent back, through host memory
// (dispatch.go). Ranks may also be the stages of a pipeline: each holds a part of the layers, and
// batches pass through the stages one after the other (stage.go).
//
// Letters used in names and comments, all sizes of row-major arrays:
//
//	T  tokens in the current batch (rows × sequence length)     H  hidden size
//	S  sequence length                                          A  query heads
//	V  vocabulary size                                          G  key/value heads
//	L  layers                                                   D  size of one head, mostly H/A
//	E  experts                                                  I  width of one expert (or of the dense feed-forward)
//	K  experts per token                                        R  T·K, rows of the expert products
//
// A Model is not safe for concurrent use: each call uses its buffers.
package moe
