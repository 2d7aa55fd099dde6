"""Runs Megatron core's published dataset code on cases, in the Python of the release's environment.

    original.py JOBS RESULTS [SECONDS]

JOBS is a JSON list of {case, root, cache}; RESULTS gets a JSON list of {status, message, seconds},
status one of

    wrote     the original's builder returned
    refused   it raised an exception: the message
    endless   it was still running after SECONDS of processor time, 6 by default, or the case's
              limit
    died      the process ended by a signal or exited
"""

import dataclasses, importlib.metadata, json, os, resource, signal, sys, time, warnings


class Tokenizer:
    """The tokenizer's part of a description. The original does not read other parts here."""

    vocab_size, eod, pad, eos = 50304, 0, -1, 0

    def __init__(self, identifiers):
        self.unique_identifiers = identifiers

    @property
    def special_tokens_dict(self):
        return {}


def settings(cls, **values):
    """Returns an instance of a configuration class, with the values that this release has."""
    return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.init and f.name in values})


def builder(case, cache, **more):
    """Returns the original's builder for a case. Prefixes are relative to the working directory."""
    import torch
    from megatron.core.datasets import gpt_dataset, utils
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    at = tuple(int(n) for n in importlib.metadata.version("megatron-core").split(".")[:2])
    parse = utils.get_blend_from_list if at >= (0, 7) else lambda words: words
    everywhere = lambda: True
    try:
        config_class = gpt_dataset.GPTDatasetConfig
    except AttributeError:
        from megatron.core.datasets.blended_megatron_dataset_config import GPTDatasetConfig as config_class
    config = settings(
        config_class,
        is_built_on_rank=everywhere,
        random_seed=case["seed"],
        sequence_length=case["sequence_length"],
        blend=None if case["data_path"] is None else parse(case["data_path"]),
        blend_per_split=None if case["per_split"] is None else [parse(words) for words in case["per_split"]],
        split=case["split"],
        path_to_cache=cache,
        tokenizer=Tokenizer(case["tokenizer"]),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=not case["keep_partial"],
        add_extra_token_to_sequence=case["extra_token"],
        mid_level_dataset_surplus=case["surplus"],
        renormalize_blend_weights=case["renormalize"],
        **more,
    )
    args = (gpt_dataset.GPTDataset, case["sizes"])
    return BlendedMegatronDatasetBuilder(*args, *([everywhere] if at >= (0, 6) else []), config)


def run(job, seconds):
    """Runs one job in a separate process."""
    began = time.time()
    seconds = max(seconds, job["case"].get("seconds", 0))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 0
        try:
            used = resource.getrusage(resource.RUSAGE_SELF)
            resource.setrlimit(
                resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, resource.RLIM_INFINITY)
            )
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            os.chdir(job["root"])
            os.makedirs(job["cache"], exist_ok=True)
            builder(job["case"], job["cache"]).build()
        except BaseException as e:
            code = 1
            os.write(write, f"{type(e).__name__}: {e}".encode()[:2000])
        os.close(write)
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        message = f.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        result = (
            {"status": "endless", "message": f"still running after {seconds} s"}
            if number == signal.SIGXCPU
            else {"status": "died", "message": signal.Signals(number).name}
        )
    else:
        result = {"status": ["wrote", "refused"][os.WEXITSTATUS(status)], "message": message}
    result["seconds"] = round(time.time() - began, 3)
    return result


def main():
    warnings.simplefilter("ignore")
    import numpy, torch
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset  # before the fork

    try:
        from megatron.core.datasets import helpers_cpp
    except ImportError:
        from megatron.core.datasets import helpers
    with open(sys.argv[1]) as f:
        jobs = json.load(f)
    versions = {
        "megatron-core": importlib.metadata.version("megatron-core"),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    with open(sys.argv[2], "w") as f:
        json.dump(
            {"versions": versions, "results": [run(job, int(sys.argv[3]) if len(sys.argv) > 3 else 6) for job in jobs]},
            f,
        )


if __name__ == "__main__":
    main()
