"""Run by cuda_sanitizer.sh under each of its tools: every variant of the GPU at T = 1, 4 and 8 with all options."""

import sys

import torch

from support import MODEL, OPTIONS, SMALL, make_inputs, runners


def main():
    reads = 0
    inputs = make_inputs(MODEL, 8).map(lambda t: t.cuda())
    small = make_inputs(SMALL, 8).map(lambda t: t.cuda())
    streams = {MODEL: (inputs, inputs.bf16_streams()), SMALL: (small, small.bf16_streams())}
    for runner in runners():
        if runner.device != "cuda":
            continue
        for fold, inject, q8_1 in OPTIONS:
            if runner.q8_columns == 32 and not q8_1:
                continue
            for tokens in (1, 4, 8):
                for geometry, inputs_of in streams.items():
                    for these in inputs_of if runner.takes(geometry) else ():
                        runner(these.tokens(slice(tokens)).ask(fold=fold, inject=inject), q8_1=q8_1)
                        reads += 1
    torch.cuda.synchronize()
    print(f"{reads} reads on {torch.cuda.get_device_name()}")
    return 0 if reads else 1


if __name__ == "__main__":
    sys.exit(main())
