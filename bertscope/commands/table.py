"""The commands, a row for each: `--help` and its groups, typer commands, public names and docs/cli.md follow."""

# No import here: with `python -m bertscope` the working directory may have a module of any name, such as typing.py.


class Command:
    """A command, which calls the public function of its name.

    `options` are rows of options.py in the order of the help; `*`: the settings of the function's row of QUESTIONS.
    `text` is that of its help: the line in the list of commands, paragraphs, examples.
    """

    def __init__(self, function: str, options: str, text: str, group: str = "") -> None:
        self.function, self.options, self.text, self.group = function, options, text, group

    @property
    def name(self) -> str:
        """Return the name on the command line, which is the public function's."""
        return self.function.partition(":")[2]

    @property
    def body(self) -> str:
        """Return the module in this folder whose function of the command's name calls it and shows its report."""
        return "tools" if self.group in ("CI", "Tools") else self.group.lower()

    @property
    def settings(self) -> list[str]:
        """Return the settings of a run that are options of the command."""
        words = self.options.split()
        if "*" not in words:
            return []
        from bertscope.settings.run_config import QUESTIONS  # which the list of commands needs not

        own = {word.lstrip("-") for word in words}
        return [name for name in QUESTIONS[self.name].table if name not in own]

    @property
    def line(self) -> str:
        """Return the line in the list of commands."""
        return self.text.strip().partition("\n")[0]


_MODEL = "model architecture attention add_pooling_layer lora download"
_OUT = "fmt output verbose"
_SHAPES = "batch seq shapes inputs"
_LENGTHS = "lengths lengths_field tokenizer tokens_per_batch"
_VIEW = "rows timeline snapshot"
_GROUPS = {
    "Model": (
        Command(
            "bertscope.api.counts:count",
            f"by dtype unfold sort {_MODEL} others freeze untie style columns expect {_SHAPES} stored {_OUT}",
            """
Count the parameters of a model or checkpoint, layer by layer.

Equal layers are one row with the number of copies; "per layer" is one of them. Tied tensors are counted in two
ways: unique parameters (every tensor once) and the sum over layers (at every layer that uses them). --untie counts
them at every name, as if nothing were shared. Several models are one row each, with --by group one column each.

examples:
  bertscope count bert-large-zh
  bertscope count bert-base-uncased --by group
  bertscope count bert-tiny bert-base-uncased bert-large-uncased --format csv
  bertscope count bert-base-cased --architecture BertForSequenceClassification --freeze embeddings
  bertscope count bert-base-uncased -a BertForSequenceClassification --lora r=8,target=query+value,save=classifier
  bertscope count bert-base-uncased --shapes --batch 8 --seq 512
  bertscope count bert-base-uncased -a BertForPreTraining --untie
  bertscope count bert-large-zh --expect 324,472,832
  bertscope count ./my-bert/model.safetensors --by parameter
""",
        ),
        Command(
            "bertscope.api.counts:tree",
            f"depth interactive style columns {_MODEL} freeze unfold {_SHAPES} {_OUT}",
            """
Show the module tree with parameters and shares.

Every row sums its module and all below it, so the totals are the same at every depth. A number such as 3-6 means
the sixth module at depth 3, as in torchinfo.

examples:
  bertscope tree --depth 3
  bertscope tree bert-base-cased --style torchinfo --shapes
  bertscope tree bert-tiny --style torchinfo --columns output_size,num_params,mult_adds
  bertscope tree bert-base-uncased --style torch --architecture BertForSequenceClassification
  bertscope tree bert-base-uncased --shapes --batch 4096 --seq 512
  bertscope tree bert-base-uncased --unfold --format csv
  bertscope tree ./my-bert/model.safetensors --depth 2
  bertscope tree bert-large-zh --interactive --shapes
""",
        ),
        Command(
            "bertscope.api.explain:flops",
            f"* {_MODEL} others depth operators convention {_OUT}",
            """
Count the FLOPs of a forward pass or a training step.

The operators are those that torch dispatches on the meta device, for backward and recomputation too. One
multiply-add is 2 FLOPs; matrix products and elementwise work have separate columns. Several batches and lengths are
one row for each combination, and several models one row each.

examples:
  bertscope flops bert-large-zh --seq 512
  bertscope flops bert-base-uncased --mode training --checkpointing full
  bertscope flops bert-base-chinese --convention calflops --attention eager
  bertscope flops --seq 128,256,512 --batch 1,8,32 --depth 1
  bertscope flops bert-tiny --operators
  bertscope flops bert-tiny bert-mini --seq 128,512 --format csv
""",
        ),
        Command(
            "bertscope.api.explain:explain",
            f"naming {_MODEL} path batch seq inputs lang fmt output",
            """
Explain a model step by step, with formulas for every number.

The steps of a model that is no BERT, or that has adapters, are the modules that own parameters or compute matrix
products. The sums compare the formulas with the counts of the built model. Sections on the configuration, inputs
and outputs of a BERT, on caches, relative positions and checkpointing follow, with their shapes at --batch and
--seq.

examples:
  bertscope explain bert-large-zh
  bertscope explain bert-large-zh Transformer-0-FeedForward
  bertscope explain bert-base-cased encoder.layer.3 --naming tf
  bertscope explain bert-base-uncased outputs --seq 512
  bertscope explain bert-base-uncased config
  bertscope explain bert-large-zh --lang zh
  bertscope explain bert-tiny encoder --lora r=8,target=query+value
""",
        ),
        Command(
            "bertscope.api.explain:diagram",
            "model architecture attention add_pooling_layer position_embedding cross_attention download path batch seq "
            "kind class_name implementation nn_module depth cache mask head_mask direction inputs fmt output",
            """
Draw a model's classes, forward pass or module tree.

A forward pass is drawn as its dataflow, with the actual shapes. The diagram comes from the imported classes and a
run on the meta device. Equal layers are drawn once. The diagram of a self-attention (PATH
encoder.layer.0.attention.self) has a mask, a head mask and, in a decoder, a cache.

examples:
  bertscope diagram
  bertscope diagram bert-base-uncased --class BertAttention
  bertscope diagram --kind forward bert-large-zh
  bertscope diagram --kind forward bert-base-uncased encoder.layer.0.attention.self
  bertscope diagram --kind forward bert-tiny encoder.layer.0.attention.self --position-embedding relative_key_query
  bertscope diagram --kind forward bert-tiny encoder.layer.0 --cross-attention --cache 16
  bertscope diagram --kind tree bert-base-uncased --depth 2 --output tree.svg
""",
        ),
        Command(
            "bertscope.api.page:diff",
            "a b dtype allow strip_prefix architecture attention add_pooling_layer lora batch seq exit_code download "
            "fmt output",
            """
Compare two models, or a model with a checkpoint.

Of two models: settings, parameters added, removed or changed in shape, totals and FLOPs. Equal changes of
neighbouring layers are one row. The options that change a model apply to both. Two files with tensors are compared
by their headers.

Of a model and a checkpoint's header: missing, unexpected, shapes, dtypes, ties, buffers, bytes. No weight is
loaded, no pickle is run. Names of old checkpoints (TensorFlow's gamma and beta for a LayerNorm's weight and bias,
bert. in front or not) are understood. The report accounts for every byte of the file. A folder with weights and a
config.json is a model; it is a checkpoint with --dtype, --allow or --strip-prefix, and without B.

examples:
  bertscope diff bert-base-cased bert-base-uncased
  bertscope diff bert-base-uncased bert-large-uncased --architecture BertModel --seq 512
  bertscope diff my-bert.yaml bert-tiny --exit-code
  bertscope diff ./my-bert
  bertscope diff bert-tiny ./my-bert/model.safetensors
  bertscope diff bert-tiny ./my-bert --architecture BertModel --allow unexpected
  bertscope diff ./my-bert/config.json ./my-bert --dtype fp32 --format json
  bertscope diff bert-tiny ./my-bert/model.safetensors --strip-prefix auto
exit codes: 0 the checkpoint fits, 1 it does not, 2 a file cannot be read
""",
        ),
        Command(
            "bertscope.api.page:report",
            f"output compare fit * {_MODEL} fmt",
            """
Write everything about a model on one page.

The page works offline: fit, parameters, FLOPs, memory, diagram. It begins with the answer: if the step fits in the
budget or on the GPU. It is one file with light and dark colours, for screen, print and phone; its tables can be
sorted and searched. Each section names the command that gives its numbers.

examples:
  bertscope report bert-large-zh -o report.html
  bertscope report bert-tiny --gpu t4 --precision autocast-fp16 -o t4.html
  bertscope report bert-base-uncased --compare bert-base-cased -o two.html
  bertscope report bert-tiny --batch 32 --seq 512 --budget 8GiB -o tiny.html
  bertscope report bert-tiny --format json --no-fit
""",
        ),
        Command(
            "bertscope.api.tools:presets",
            f"name config {_OUT}",
            """
List the presets with their counts, without importing torch.

examples:
  bertscope presets
  bertscope presets --format json
  bertscope presets bert-base-cased --config
  bertscope presets bert-base-cased --config --output config.json
""",
        ),
    ),
    "Memory": (
        Command(
            "bertscope.api.memory:estimate",
            f"* {_MODEL} others show_script {_VIEW} {_LENGTHS} {_OUT}",
            """
Estimate a step's memory: the peak, its parts and operator.

It allocates nothing. torch dispatches forward, backward, recomputation and the optimizer step on tensors without
memory. The peak on a CPU is exact or nearly exact. CUDA's kernels and allocator are simulated. Several models are
one row each.

examples:
  bertscope estimate bert-large-zh --batch 32 --seq 512 --precision autocast-bf16
  bertscope estimate --checkpointing --batch 8 --seq 512
  bertscope estimate bert-large-uncased --gpu t4 --batch 16 --seq 512 --checkpointing
  bertscope estimate --device cuda --precision autocast-bf16 --attention sdpa
  bertscope estimate bert-tiny bert-mini --seq 512 --format markdown
  bertscope estimate bert-large-uncased --world-size 8 --strategy fsdp --checkpointing
  bertscope estimate bert-base-uncased --lengths normal:128,64,16,512 --batch 32
  bertscope estimate bert-base-uncased --lora r=8,alpha=16,dropout=0.05,target=query+value
  bertscope estimate bert-tiny --gpu t4 --precision autocast-fp16 --show-script
""",
        ),
        Command(
            "bertscope.api.memory:profile",
            f"* -world_size {_MODEL} {_VIEW} save {_OUT}",
            """
Run the real step; measure its memory and time.

Each strategy runs in a separate process, next to the estimate. torch's profiler records the allocator's peak;
separate steps without it give the times. With --nproc real ranks run the step, on gloo or with CUDA on NCCL; ranks
that agree are one row. --save also measures the rates of the card, from which estimate, fit and plan predict times.
Exit code 3 if the memory of a run could not be measured: out of memory, killed, too slow; 130 if it was
interrupted.

examples:
  bertscope profile
  bertscope profile bert-tiny --batch 8 --checkpointing none,full,selective
  bertscope profile bert-tiny --seq 512 --checkpointing --timeline step.html
  bertscope profile bert-tiny --mode inference --memory-limit 2GiB
  bertscope profile bert-tiny --nproc 2 --strategy fsdp
""",
        ),
        Command(
            "bertscope.api.run:run",
            f"script arguments module fit * {_VIEW} {_OUT}",
            """
Run your training script on a GPU that is not there.

The report says what fits, and which line needs the most memory. It executes the script: data, tokenizers and
metrics are real, and what is on cuda has no values. What it writes is discarded, and it has no network. It ends
after --steps optimizer steps and one evaluation.

examples:
  bertscope run train.py
  bertscope run --gpu t4 --timeline run.html train.py --lr 3e-5 --epochs 3
  bertscope run --gpu t4 --fit batch_size=1..512 train.py
  bertscope run --budget 12GiB --format json -m train
exit codes: 0 it fits, 1 it does not, 2 the script failed, 3 the run failed or
            no model ran on the GPU
""",
        ),
        Command(
            "bertscope.api.memory:fit",
            f"batch batch_total * {_LENGTHS} {_MODEL} {_OUT}",
            """
Find the largest batch that fits in a memory budget.

It is found for each checkpointing strategy and precision. On a GPU the allocator is simulated, with the largest
CUDA context that was published for it or that a calibration measured. With --batch, find the strategies and
precisions with which it fits, cheapest first. Exit code 1 if nothing fits for certain. Several GPUs are in one
table with the answer for each GPU first. With --world-size the batch is that of one rank of a job; with
--batch-total find the number of ranks.

examples:
  bertscope fit bert-large-uncased --gpu a100-40gb --world-size 8 --strategy fsdp --checkpointing full
  bertscope fit bert-large-uncased --gpu t4 --batch-total 64 --seq 128 --precision autocast-fp16
  bertscope fit bert-large-uncased --budget 16GiB --seq 512
  bertscope fit bert-base-uncased --budget 8GiB --lengths normal:128,64,16,512
  bertscope fit bert-base-uncased --gpu t4 --seq 512 --mode inference --precision fp16
""",
        ),
        Command(
            "bertscope.api.memory:plan",
            f"batch batch_total may_change emit plot * {_MODEL} {_OUT}",
            """
Find what to recompute so that a step fits, and print the code.

The plan needs the fewest recompute FLOPs. Layers keep the outputs of some matrix products and compute the rest
again. Each plan of the table was run on tensors without memory, with the kernels and the allocator of the card.
--emit prints what to paste; estimate, profile, fit, report and sweep take the file of --emit json by --plan.

examples:
  bertscope plan bert-large-uncased --gpu t4 --batch 24 --seq 512 --precision autocast-fp16
  bertscope plan bert-large-uncased --budget 11GiB --batch-total 64 --seq 512 --precision autocast-bf16
  bertscope plan bert-mini --budget 450MiB --batch 64 --may-change 8bit
  bertscope plan bert-mini --budget 450MiB --batch 64 --emit torch
  bertscope plan bert-mini --budget 450MiB --batch 64 --emit json --output plan.json
exit codes: 0 a plan fits, 1 none does, 2 the question is wrong
""",
        ),
        Command(
            "bertscope.api.why:why",
            f"file plot * {_MODEL} {_OUT}",
            """
Explain what filled a card, from a snapshot or an error message.

The one change that frees most is named first. The blocks of a snapshot are shown by part, line of code and module;
leaks, second models and fragmentation are named. With MODEL, the estimate of its step is next to them. No code in a
file runs: snapshots are read as plain values, in a process with limits.

examples:
  bertscope why oom.log
  bertscope why snapshot.pickle --plot history.svg --format json
  bertscope why snapshot.pickle bert-base-uncased --gpu t4 --batch 32 --seq 512
  python train.py 2>&1 | bertscope why - bert-base-uncased --batch 32 --seq 512
exit codes: 0 the file is explained, 2 it is none of these, or is not there
""",
        ),
        Command(
            "bertscope.api.tools:sweep",
            "grid output init engine workers address plan allow_code fmt rows sort verbose",
            """
Estimate every point of a grid, and go on after an interruption.

A grid is models x batches x lengths x precisions x strategies ... A row is in FILE as soon as its point is
computed: the same command goes on after an interruption and computes no point twice. At the end the rows are in the
order of the grid. Exit code 1 if a point has no estimate.

examples:
  bertscope sweep new-grid.yaml --init
  bertscope sweep grid.yaml -o results.jsonl
  bertscope sweep grid.yaml -o results.jsonl --workers 2 --sort peak_bytes --format csv
""",
        ),
    ),
    "CI": (
        Command(
            "bertscope.analyses.check:check",
            "files presets write_to update allow_code architecture fmt output",
            """
Verify the expectations in files.

They are counts, ties, FLOPs of a run and estimated peak memory. A failure names expected, got, the difference, and
the file and line of the expectation.

examples:
  bertscope check
  bertscope check models.bertscope.yaml presets/bert-tiny.yaml my-bert.yaml
  bertscope check --presets
  bertscope check --format github .
  bertscope check --format junit --output report.xml models.bertscope.yaml
  bertscope check --write my-bert.yaml
  bertscope check --update models.bertscope.yaml
  bertscope check --allow-code models.bertscope.yaml
exit codes: 0 all pass, 1 one fails, 2 no file, or one that cannot be checked
""",
        ),
    ),
    "Tools": (
        Command(
            "bertscope.reports.json:schema",
            "kind fmt output",
            """
Print the JSON Schema of the output of --format json.

It is of draft 2020-12, and generated from the classes of the reports, so it matches the installed version.

examples:
  bertscope schema
  bertscope schema count
  bertscope schema config
  bertscope schema memory --output memory.schema.json
""",
        ),
        Command(
            "bertscope.analyses.doctor:doctor",
            "fmt output",
            """
Show the environment: versions, devices, extras, presets.

It also works if torch is missing or broken, and exits 0.

examples:
  bertscope doctor
  bertscope doctor --format markdown --output environment.md
""",
        ),
    ),
}
COMMANDS = {
    row.name: Command(row.function, row.options, row.text, group) for group, rows in _GROUPS.items() for row in rows
}
# Words that are no command: former names, and those of other tools, and what to type instead.
REMOVED = {
    "summary": "tree MODEL --style torchinfo", "params": "count MODEL", "parameters": "count MODEL",
    "info": "count MODEL", "show": "tree MODEL", "memory": "estimate MODEL", "vram": "estimate MODEL --gpu t4",
    "compare": "diff MODEL MODEL", "macs": "flops MODEL", "flop": "flops MODEL", "list": "presets", "oom": "why FILE",
    "calibrate": "profile --device cuda --save FILE",
    "convert": "presets NAME --config",
    "explore": "tree --interactive",
    "print": "tree --style torch",
    "verify": "diff MODEL CHECKPOINT",
}  # fmt: skip
