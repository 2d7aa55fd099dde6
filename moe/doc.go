// Package moe is the model: decoder-only transformers of the OLMoE family, forward and backward,
// and their Hugging Face form.
//
// Two architectures are built. "olmoe" is the mixture of experts of
// https://arxiv.org/abs/2409.02060 (transformers' OlmoeForCausalLM): RMSNorm, q/k norm over the
// whole projected vector, rotate-half RoPE, a router that takes the softmax over all experts before
// choosing the top k and does not renormalise, SwiGLU experts, no token dropped. "olmo" is its
// dense relative (OlmoForCausalLM): LayerNorm without weights, one SwiGLU feed-forward per layer.
//
// Numbers are float32. A pass is a sequence of commands to an [xpu.Device], in whose memory
// weights, gradients and activations are; what comes to the host are losses and the statistics of
// the routers, once in a pass. The bits of a result do not depend on the number of threads.
//
// Several ranks may share the experts of a model ([NewParallel]): each holds a part of them and
// everything else, and takes its own batches. In every mixture of experts the hidden states go to
// the ranks of the chosen experts and the results come back, by way of the host (dispatch.go). And
// ranks may be the stages of a pipeline, each with a part of the layers, through which batches go
// one after the other (stage.go).
//
// Letters used in names and comments, all sizes of row-major arrays:
//
//	T  tokens in the batch at hand (rows × sequence length)     H  hidden size
//	S  sequence length                                          A  query heads
//	V  vocabulary size                                          G  key/value heads
//	L  layers                                                   D  size of one head, H/A
//	E  experts                                                  I  width of one expert (or of the dense feed-forward)
//	K  experts per token                                        R  T·K, rows of the expert products
//
// A Model is not safe for concurrent use: its buffers serve one call at a time.
package moe
