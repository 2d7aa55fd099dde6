package train

import (
	"context"
	"runtime"

	"mula/blend"
	"mula/train/devices"
	"mula/xpu"
)

// Kept has what a process keeps of a run that has lost another rank, for its next call of [Run]
// with the same configuration: the open plan, the device with its compiled programs, and the
// measured peak. The weights are not kept, because the ranks resume from an older state. The zero
// value has nothing.
type Kept struct {
	data  *blend.Data
	rank  int // for which data was opened
	ranks int // of the run

	device xpu.Device
	opened openedDevice
	start  start // the name of the device and its peak
}

// openedDevice describes how the device of a run was opened.
type openedDevice struct {
	options devices.Options
	sharing int // ranks that use the same device
}

// Close closes what is kept.
func (k *Kept) Close() {
	if k.device != nil {
		k.device.Close()
	}
	if k.data != nil {
		k.data.Close()
	}
	*k = Kept{}
}

// keep moves the plan and the device of the run to the caller. It releases the memory of the model.
// If commands of the device fail, the device is not kept.
func (r *run) keep() {
	k := r.options.Kept
	k.data, k.rank, k.ranks = r.data, r.ranks.Rank(), r.ranks.Ranks()
	r.data = nil
	if r.device == nil {
		return
	}
	// The ranks have left their groups, so no transfer begins any more.
	for _, p := range r.batch.pending {
		_ = p.Wait() // the run has failed with its error
		p.transfers.Join()
	}
	if r.device.Wait(context.Background()) != nil {
		return
	}
	r.optimizer.Free()
	if r.pipeline != nil {
		r.pipeline.Free()
	}
	if r.model != nil {
		r.model.Close()
	}
	k.device, k.opened = r.device, r.opened
	k.start = start{device: r.start.device, deviceWhy: r.start.deviceWhy, peak: r.start.peak}
	r.device = nil
}

// takeKept takes the plan of the last run in this process, if it was opened for the same rank.
func (r *run) takeKept() {
	k := r.options.Kept
	if k == nil || k.data == nil && k.device == nil {
		return
	}
	runtime.GC() // frees the memory of the last model before there is a new one
	if k.data != nil && k.rank == r.ranks.Rank() && k.ranks == r.ranks.Ranks() {
		r.data, k.data = k.data, nil
	}
}

// takeDevice takes the device of the last run in this process, if it would be opened in the same
// way, and reports whether it did. Otherwise it closes the device.
func (r *run) takeDevice(options devices.Options) bool {
	k := r.options.Kept
	if k == nil || k.device == nil {
		return false
	}
	// The first rank has not chosen a device yet.
	if k.opened.options != options || !r.leads() && k.start.device != r.start.device {
		k.device.Close()
		k.device = nil
		return false
	}
	r.device, r.opened, k.device = k.device, k.opened, nil
	if r.leads() {
		r.start.device, r.start.deviceWhy, r.start.peak = k.start.device, k.start.deviceWhy, k.start.peak
	}
	return true
}
