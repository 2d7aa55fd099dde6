//go:build purego || !amd64

package cpu

func updateSixteens(which updateKernel, w, grad, a, b []float32, k *updateConstants) {
	updateGo(which, w, grad, a, b, k)
}
