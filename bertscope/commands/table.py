"""The commands, a row each: help, typer commands, public names and docs/cli.md are made from it."""

# No import here: with `python -m bertscope` the working directory may have a module of any name, such as typing.py.


class Command:
    """A command, which calls the public function with its name.

    `options` names rows in options.py, ordered as in the help; `*` means the settings in its row in QUESTIONS.
    `text` is the help: the line in the list of commands, paragraphs, examples.
    """

    def __init__(self, function: str, options: str, text: str, group: str = "") -> None:
        self.function, self.options, self.text, self.group = function, options, text, group

    @property
    def name(self) -> str:
        """Return the name on the command line and in Python."""
        return self.function.partition(":")[2]

    @property
    def body(self) -> str:
        """Return the module in this folder that has the command's function."""
        return {"Memory": "memory", "CI and tools": "tools"}.get(self.group, "model")

    @property
    def settings(self) -> list[str]:
        """Return the settings that are options."""
        names = self.options.split()
        if "*" not in names:
            return []
        from bertscope.settings.run_config import QUESTIONS  # which the list of commands needs not

        listed = {word.lstrip("-") for word in names}
        return [name for name in QUESTIONS[self.name].table if name not in listed]

    @property
    def line(self) -> str:
        """Return the line in the command list."""
        return self.text.strip().partition("\n")[0]


_MODEL = "model architecture attention add_pooling_layer lora download"
_OUT = "fmt output verbose"
_SHAPES = "batch seq shapes inputs"
_LENGTHS = "lengths lengths_field tokenizer seeds"
_VIEW = "rows timeline snapshot"
_GROUPS = {
    "Parameters and FLOPs": (
        Command(
            "bertscope.api.counts:count",
            f"by dtype unfold sort {_MODEL} others quantize freeze untie style columns expect {_SHAPES} stored {_OUT}",
            """
Count parameters of a model or checkpoint; --shapes adds shapes.

Equal layers share one row. A tied tensor, such as a decoder that shares the word embeddings, counts once in "unique
parameters" and at every layer that uses it in "sum over layers".

examples:
  bertscope count bert-large-zh
  bertscope count bert-tiny bert-base-uncased bert-large-uncased --format csv
  bertscope count bert-base-cased --architecture BertForSequenceClassification --freeze embeddings
  bertscope count bert-base-uncased -a BertForSequenceClassification --lora r=8,target=query+value,save=classifier
  bertscope count bert-base-uncased --shapes --batch 8 --seq 512
  bertscope count bert-large-zh --expect 324,472,832
  bertscope count ./my-bert/model.safetensors --by parameter
""",
        ),
        Command(
            "bertscope.api.explain:flops",
            f"* {_MODEL} others depth operators convention {_OUT}",
            """
Count the FLOPs of a forward pass or a training step.

Each operator that torch dispatches is counted, in backward and recomputation too. One multiply-add counts as 2 FLOPs.
Several batch sizes or lengths get one row each.

examples:
  bertscope flops bert-large-zh --seq 512
  bertscope flops bert-base-uncased --mode training --checkpointing full
  bertscope flops bert-base-chinese --convention calflops --attention eager
  bertscope flops --seq 128,256,512 --batch 1,8,32 --depth 1
  bertscope flops bert-tiny bert-mini --seq 128,512 --format csv
""",
        ),
        Command(
            "bertscope.api.counts:tree",
            f"depth interactive style columns {_MODEL} freeze unfold {_SHAPES} {_OUT}",
            """
Show the module tree with parameters and shares.

Each row is the sum of a module and all modules inside it.

examples:
  bertscope tree --depth 3
  bertscope tree bert-base-cased --style torchinfo --shapes
  bertscope tree bert-tiny --style torchinfo --columns output_size,num_params,mult_adds
  bertscope tree bert-base-uncased --style torch --architecture BertForSequenceClassification
  bertscope tree bert-base-uncased --unfold --format csv
  bertscope tree ./my-bert/model.safetensors --depth 2
  bertscope tree bert-large-zh --interactive --shapes
""",
        ),
    ),
    "Memory": (
        Command(
            "bertscope.api.memory:fit",
            f"batch batch_total exact * {_LENGTHS} {_MODEL} {_OUT}",
            """
Find the largest batch that fits on a GPU or in a memory budget.

Each precision and checkpointing strategy gets a row. With --batch, find the settings with which this batch fits. With
--batch-total, find the number of GPUs. No GPU is used.

examples:
  bertscope fit bert-base-uncased --gpu t4 --seq 512 --mode inference --precision fp16
  bertscope fit bert-large-uncased --gpu t4,l4 --sequences 100000 --price t4=0.35,l4=0.71
  bertscope fit bert-base-uncased --budget 8GiB --lengths normal:128,64,16,512
  bertscope fit bert-large-uncased --gpu a100-40gb --world-size 8 --strategy fsdp --checkpointing full
  bertscope fit bert-large-uncased --gpu t4 --batch-total 64 --seq 128 --precision autocast-fp16
exit code 1: nothing certainly fits
""",
        ),
        Command(
            "bertscope.api.why:why",
            f"file plot * {_MODEL} {_OUT}",
            """
Explain an out-of-memory error or a memory snapshot.

It names the main cause and its fix, then what filled the memory: by part, line of code and module. With MODEL,
compare it with an estimate of the step. A snapshot is read as data: no code in it runs.

To record a snapshot, call torch.cuda.memory._record_memory_history(stacks='python') before the model is built, and
torch.cuda.memory._dump_snapshot('snapshot.pickle') in 'except torch.OutOfMemoryError'.

examples:
  bertscope why oom.log
  bertscope why snapshot.pickle --plot history.svg --format json
  bertscope why snapshot.pickle bert-base-uncased --gpu t4 --batch 32 --seq 512
  python train.py 2>&1 | bertscope why - bert-base-uncased --batch 32 --seq 512
exit codes: 0 the file is explained, 2 it is missing or has no such content
""",
        ),
        Command(
            "bertscope.api.memory:estimate",
            f"* {_MODEL} others show_script {_VIEW} {_LENGTHS} {_OUT}",
            """
Estimate the peak memory of a training step and its parts.

No memory is allocated and no GPU is needed: forward, backward and optimizer step run on fake tensors.

examples:
  bertscope estimate bert-large-zh --batch 32 --seq 512 --precision autocast-bf16
  bertscope estimate --checkpointing --batch 8 --seq 512
  bertscope estimate bert-large-uncased --gpu t4 --batch 16 --seq 512 --checkpointing
  bertscope estimate bert-large-uncased --world-size 8 --strategy fsdp --checkpointing
  bertscope estimate bert-base-uncased --lengths normal:128,64,16,512 --batch 32
  bertscope estimate bert-tiny --gpu t4 --precision autocast-fp16 --show-script
exit code 1: nothing fits on --gpu
""",
        ),
        Command(
            "bertscope.api.memory:plan",
            f"batch batch_total may_change emit plot * {_MODEL} {_OUT}",
            """
Find the cheapest checkpointing plan that makes a step fit.

A plan says which activations each layer saves and which it recomputes. --emit torch prints the code. --emit json
writes a file for --plan of estimate, profile, fit, report and sweep.

examples:
  bertscope plan bert-large-uncased --gpu t4 --batch 24 --seq 512 --precision autocast-fp16
  bertscope plan bert-mini --budget 450MiB --batch 64 --may-change 8bit
  bertscope plan bert-mini --budget 450MiB --batch 64 --emit torch
  bertscope plan bert-mini --budget 450MiB --batch 64 --emit json --output plan.json
exit codes: 0 a plan fits, 1 no plan fits, 2 wrong input
""",
        ),
        Command(
            "bertscope.api.run:run",
            f"script arguments module fit * {_VIEW} {_OUT}",
            """
Dry-run your training script on a simulated GPU.

It shows the peak and the line of code that causes it. The script really runs, with its data and tokenizer, but tensors
on cuda have no values. Its files are discarded and it has no network. It ends after --steps optimizer steps.

examples:
  bertscope run train.py
  bertscope run --gpu t4 --timeline run.html train.py --lr 3e-5 --epochs 3
  bertscope run --gpu t4 --fit batch_size=1..512 train.py
  bertscope run --budget 12GiB --format json -m train
exit codes: 0 it fits, 1 it does not fit, 2 the script failed,
            3 the run failed or no model ran on the GPU
""",
        ),
        Command(
            "bertscope.api.memory:profile",
            f"* -world_size {_MODEL} {_VIEW} save {_OUT}",
            """
Measure the memory and time of a real step.

Each checkpointing strategy runs in a separate process, and the estimate is shown next to the measurement. --nproc runs
real ranks on this machine. --save writes a calibration of this GPU, with which other commands predict times. Exit code
3: out of memory, killed or too slow.

examples:
  bertscope profile
  bertscope profile bert-tiny --batch 8 --checkpointing none,full,selective
  bertscope profile bert-tiny --seq 512 --checkpointing --timeline step.html
  bertscope profile bert-tiny --nproc 2 --strategy fsdp
""",
        ),
        Command(
            "bertscope.api.tools:sweep",
            "grid output init engine workers address plan allow_code fmt rows sort verbose",
            """
Estimate a grid of settings; resumable.

The grid is a YAML file with a value or a list for each setting. Each result is appended to --output at once, so the
same command continues after an interruption. Exit code 1: a point has no estimate.

examples:
  bertscope sweep --init
  bertscope sweep grid.yaml -o results.jsonl
  bertscope sweep grid.yaml -o results.jsonl --workers 2 --sort peak_bytes --format csv
""",
        ),
    ),
    "Model": (
        Command(
            "bertscope.api.explain:explain",
            f"naming {_MODEL} path batch seq inputs lang fmt output",
            """
Explain a model step by step, with a formula for every number.

Each formula is checked against the count of the built model. A BERT also gets sections on its configuration, inputs,
outputs, caches, relative positions and checkpointing.

examples:
  bertscope explain bert-large-zh
  bertscope explain bert-base-cased encoder.layer.3 --naming tf
  bertscope explain bert-base-uncased outputs --seq 512
  bertscope explain bert-large-zh --lang zh
  bertscope explain bert-tiny encoder --lora r=8,target=query+value
""",
        ),
        Command(
            "bertscope.api.explain:diagram",
            f"{_MODEL} position_embedding cross_attention path batch seq "
            "kind class_name implementation nn_module config depth cache mask head_mask direction inputs fmt output",
            """
Draw a model's classes, forward pass or module tree.

A forward pass is drawn as dataflow with shapes, from a run on the meta device. Equal layers are drawn once.

examples:
  bertscope diagram bert-base-uncased -o classes.svg
  bertscope diagram bert-base-uncased --class BertAttention
  bertscope diagram --kind forward bert-large-zh
  bertscope diagram --kind forward bert-base-uncased encoder.layer.0.attention.self
  bertscope diagram --kind forward bert-tiny encoder.layer.0.attention.self --position-embedding relative_key_query
  bertscope diagram --kind forward bert-tiny encoder.layer.0 --cross-attention --cache 16
  bertscope diagram --kind forward bert-tiny encoder.layer.0.attention.self --lora r=8,target=query+value
  bertscope diagram --kind tree bert-base-uncased --depth 2 --output tree.svg
""",
        ),
        Command(
            "bertscope.api.page:report",
            f"output compare fit * {_MODEL} fmt",
            """
Write everything about a model on one HTML page.

The page works offline and says first whether the step fits. Each section names the command that gives its numbers.

examples:
  bertscope report bert-large-zh -o report.html
  bertscope report bert-tiny --gpu t4 --precision autocast-fp16 -o t4.html
  bertscope report bert-base-uncased --compare bert-base-cased -o two.html
  bertscope report bert-tiny --format json --no-fit
""",
        ),
        Command(
            "bertscope.api.page:diff",
            "a b base dtype allow strip_prefix architecture attention add_pooling_layer lora batch seq exit_code "
            f"download {_OUT}",
            """
Compare two models, or a model with a checkpoint.

Two models: settings, parameters, totals and FLOPs that differ. A model and a checkpoint: missing and unexpected
tensors, shapes, dtypes and bytes, from the header alone. No weight is loaded and no pickle runs. A folder with a
config.json is a model, and a checkpoint with --strip-prefix, --dtype, --allow or without B. With --base, A at a git
revision and in the working directory; of code that A names, the revision's is run too.

examples:
  bertscope diff bert-base-cased bert-base-uncased
  bertscope diff bert-base-uncased bert-large-uncased --architecture BertModel --seq 512
  bertscope diff ./my-bert
  bertscope diff bert-tiny ./my-bert/model.safetensors
  bertscope diff bert-tiny ./my-bert/model.safetensors --strip-prefix auto
  bertscope diff --base main my-bert.yaml
exit codes: 0 the checkpoint fits, 1 it does not fit, 2 a file cannot be read
""",
        ),
    ),
    "CI and tools": (
        Command(
            "bertscope.analyses.check:check",
            "files presets write_to update allow_code architecture fmt output",
            """
Fail CI when parameter counts, FLOPs or memory change.

Expectations are in *.bertscope.yaml files. A failure shows the expected and the actual value, and the file and line.
A file is {model: bert-tiny, expected: {distinct_params: 4385920, flops: {x: {batch: 1, seq: 128, mode: inference,
matmul_flops: 117473280}}, memory: {x: {batch: 8, seq: 128, mode: training, peak_bytes: 97 MiB, tolerance: 2 %}}}}.

examples:
  bertscope check
  bertscope check models.bertscope.yaml presets/bert-tiny.yaml my-bert.yaml
  bertscope check --presets
  bertscope check --format junit --output report.xml models.bertscope.yaml
  bertscope check bert-base-uncased --write bert.bertscope.yaml
  bertscope check --update models.bertscope.yaml
exit codes: 0 all pass, 1 one fails, 2 a file is missing or broken
""",
        ),
        Command(
            "bertscope.api.tools:presets",
            f"name config {_OUT}",
            """
List the built-in models with their parameter counts.

examples:
  bertscope presets
  bertscope presets deberta-v2
  bertscope presets bert-base-cased --config --output config.json
""",
        ),
        Command(
            "bertscope.analyses.doctor:doctor",
            "fmt output",
            """
Check the installation: versions, devices, extras, presets.

It also works without torch, and exits 0.

examples:
  bertscope doctor
  bertscope doctor --format markdown --output environment.md
""",
        ),
        Command(
            "bertscope.commands.agents:mcp",
            "",
            """
Serve tools for agents over stdin and stdout (MCP).

count, flops, estimate, fit, plan, why and check say what a PyTorch model costs before it is trained. Nothing is
trained, downloaded or written, and no code that a client names runs. Files are read at and below the working directory.

examples:
  bertscope mcp
""",
        ),
        Command(
            "bertscope.reports.json:schema",
            "kind fmt output",
            """
Print the JSON Schema of --format json.

It is generated from the report classes of the installed version (draft 2020-12).

examples:
  bertscope schema
  bertscope schema count
  bertscope schema config
""",
        ),
    ),
}
_ROWS = [(row, group) for group, rows in _GROUPS.items() for row in rows]
COMMANDS = {row.name: Command(row.function, row.options, row.text, group) for row, group in _ROWS}
# Words that people type for a command -> what to type instead.
_INSTEAD = {
    "tree MODEL": "show layers", "tree MODEL --style torchinfo": "summary", "tree MODEL --style torch": "print",
    "tree MODEL --interactive": "explore", "count MODEL": "params parameters info size model-size stats",
    "count MODEL --shapes": "shapes shape", "flops MODEL": "macs flop thop calflops",
    "estimate MODEL": "memory mem train", "estimate MODEL --gpu t4": "vram",
    "estimate MODEL --mode inference": "infer inference predict eval evaluate", "plan MODEL --gpu t4": "recompute",
    "estimate MODEL --lengths FILE": "lengths", "run SCRIPT": "dry-run launch", "presets": "list ls models",
    "fit MODEL --gpu t4": "batch max-batch largest-batch find-batch-size tune", "diff MODEL MODEL": "compare",
    "diff MODEL CHECKPOINT": "verify", "presets NAME --config": "convert config", "report MODEL -o report.html": "html",
    "diagram MODEL": "draw graph visualize viz", "why FILE": "oom snapshot memory-viz", "profile MODEL": "benchmark",
    "profile --device cuda --save FILE": "calibrate", "check": "test validate", "doctor": "env",
    "sweep --init": "init", "--help": "help", "--version": "version",
}  # fmt: skip
REMOVED = {word: text for text, words in _INSTEAD.items() for word in words.split()}
