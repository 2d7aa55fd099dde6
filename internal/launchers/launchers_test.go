package launchers

import (
	"strings"
	"testing"
)

func TestJobIn(t *testing.T) {
	for _, test := range []struct {
		environment      string
		rank, size, here int
	}{
		{"", 0, 1, 1},
		{"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4", 3, 8, 4},
		{"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2", 1, 2, 2},
		{"PMI_RANK=1 PMI_SIZE=2", 1, 2, 1},
		{"SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=11 SLURM_STEP_TASKS_PER_NODE=4(x2),3", 5, 11, 4},
		{"SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_TASKS_PER_NODE=3,2,1", 5, 6, 3},
		{"SLURM_PROCID=0 SLURM_NTASKS=8", 0, 1, 1}, // a batch script
		{"MULA_RANK=1 MULA_WORLD=2 PMI_RANK=0 PMI_SIZE=1", 1, 2, 1},
		{"PMIX_RANK=5 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_TASKS_PER_NODE=3(x2)", 5, 6, 3},
		// PMIx of a shell in which srun was called
		{"PMIX_RANK=0 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6", 5, 6, 1},
		{"PALS_RANKID=1", 0, 1, 1},
		{"RANK=1 WORLD_SIZE=2", 0, 1, 1},
		{"TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2", 1, 2, 2},
		{"PMI_RANK=2 PMI_SIZE=2", 0, 1, 1},
		{"PMI_RANK=x PMI_SIZE=2", 0, 1, 1},
	} {
		variables := map[string]string{}
		for _, v := range strings.Fields(test.environment) {
			name, value, _ := strings.Cut(v, "=")
			variables[name] = value
		}
		p := JobIn(func(name string) string { return variables[name] })
		if p.Rank != test.rank || p.Size != test.size || p.Here != test.here {
			t.Errorf("%q: %+v", test.environment, p)
		}
	}
}
