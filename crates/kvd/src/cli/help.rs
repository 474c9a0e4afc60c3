//! Examples below the help of each command.

pub(super) const KVD: &str = "\
Examples:
  kvd demo --codec kivi-4 --passages 1 --tokens 8   see it work, in a few seconds
  kvd codecs                                        which codec to take
  kvd serve --pool \"8 GiB\"                          run the daemon";

pub(super) const SERVE: &str = "\
Examples:
  kvd serve --pool \"8 GiB\"
  kvd serve --config kvd.toml --listen localhost:7070 --set log.format=json
  KVD_DEVICE__POOL_BYTES=\"8 GiB\" kvd serve";

pub(super) const CONFIG: &str = "\
Examples:
  kvd config --print-default > kvd.toml           a file to edit, every key explained
  kvd config --config kvd.toml                    what holds, environment and flags counted in
  kvd config --pool \"8 GiB\" > kvd.toml            the same as a file";

pub(super) const SEQUENCES: &str = "\
Examples:
  kvd sequences list --idle 10m
  kvd sequences close --idle 1h --endpoint unix:/run/kvd/kvd.sock";

pub(super) const SEQUENCES_LIST: &str = "\
Examples:
  kvd sequences list
  kvd sequences list --model meta-llama/Llama-3.1-8B-Instruct --idle 10m
  kvd sequences list --json | jq '[.[].held_bytes] | add'";

pub(super) const SEQUENCES_CLOSE: &str = "\
Examples:
  kvd sequences close 1311768464867721223
  kvd sequences close --idle 1h
  kvd sequences close --session engine-0";

pub(super) const HEALTH: &str = "\
Exit codes: 0 it serves, 1 it drains or a device failed, 69 it cannot be reached in 3 seconds.

Examples:
  kvd health
  kvd health --endpoint unix:/run/kvd/kvd.sock";

pub(super) const STATUS: &str = "\
Examples:
  kvd status
  kvd status --json --namespace team-a | jq .pools";

pub(super) const TOP: &str = "\
Keys: arrows select a sequence, c closes it, s sorts (i idle, h held, t tokens, a age), q leaves.

Examples:
  kvd top
  kvd top --once --namespace team-a           one screen as text, rates over two seconds";

pub(super) const MODELS: &str = "\
Examples:
  kvd models list
  kvd models list --json --namespace team-a";

pub(super) const NAMESPACES: &str = "\
Examples:
  kvd namespaces list
  kvd namespaces list --json | jq '[.[].held_bytes] | add'";

pub(super) const NAMESPACES_SET: &str = "\
Examples:
  kvd namespaces set team-a --pool-bytes 2GiB --sequences 1000
  kvd namespaces set team-a --sequences none
  kvd namespaces set team-a --weight 4
  kvd namespaces set team-a --reset";

pub(super) const MAN_PAGES: &str = "\
Example:
  kvd man-pages ~/.local/share/man/man1";

pub(super) const DESCRIBE: &str = "\
Examples:
  kvd describe codec kivi-4
  kvd describe model tiny --endpoint unix:/run/kvd/kvd.sock";

pub(super) const DESCRIBE_CODEC: &str = "\
Examples:
  kvd describe codec kvd-2
  kvd describe codec kivi-4 --json";

pub(super) const DESCRIBE_MODEL: &str = "\
Examples:
  kvd describe model meta-llama/Llama-3.1-8B-Instruct
  kvd describe model 1311768464867721223 --json";

pub(super) const TOKEN: &str = "\
Example:
  kvd token                                   256 random bits; keep the first line secret";

pub(super) const COMPLETIONS: &str = "\
Examples:
  kvd completions bash > /etc/bash_completion.d/kvd
  kvd completions zsh > ~/.zfunc/_kvd";

pub(super) const SESSIONS: &str = "\
Examples:
  kvd sessions list
  kvd sessions close engine-0 --namespace team-a";

pub(super) const SESSIONS_LIST: &str = "\
Examples:
  kvd sessions list
  kvd sessions list --json --endpoint unix:/run/kvd/kvd.sock";

pub(super) const SESSIONS_CLOSE: &str = "\
Examples:
  kvd sessions close engine-0
  kvd sessions close 1311768464867721223";

pub(super) const CACHE: &str = "\
Examples:
  kvd cache stat
  kvd cache simulate --trace conversation_trace.jsonl";

pub(super) const CACHE_STAT: &str = "\
Examples:
  kvd cache stat
  kvd cache stat --json --endpoint unix:/run/kvd/kvd.sock";

pub(super) const CACHE_LS: &str = "\
Examples:
  kvd cache ls /var/lib/kvd/cache
  kvd cache ls --read-only --json /var/lib/kvd/cache";

pub(super) const CACHE_VERIFY: &str = "\
Examples:
  kvd cache verify /var/lib/kvd/cache
  kvd cache verify --read-only /var/lib/kvd/cache";

pub(super) const CACHE_GC: &str = "\
Examples:
  kvd cache gc --keep-bytes '8 GiB' /var/lib/kvd/cache
  kvd cache gc --scope 3f7a21c0 /var/lib/kvd/cache    as kvd cache ls shows it";

pub(super) const CACHE_EXPORT: &str = "\
Each block is verified before it is written. Files hold blocks under the engine's keys: a daemon
that registers the model alike finds them.

Examples:
  kvd cache export /var/lib/kvd/cache /mnt/exported
  kvd cache export --read-only --scope 3f7a21c0 /var/lib/kvd/cache /mnt/exported";

pub(super) const CACHE_IMPORT: &str = "\
Files that are cut off or no exports are refused before anything is written. Each block is verified;
damaged ones are left out, and the exit code is 1. Take files from machines that you trust alone.

Examples:
  kvd cache import /var/lib/kvd/cache /mnt/exported";

pub(super) const CACHE_DROP: &str = "\
Examples:
  kvd cache drop my-model
  kvd cache drop --namespace team-a --endpoint unix:/run/kvd.sock my-model";

pub(super) const CACHE_SIMULATE: &str = "\
Examples:
  kvd cache simulate --trace conversation_trace.jsonl
  kvd cache simulate --trace mine.jsonl --blocks 10000,100000 --json";

pub(super) const CODECS: &str = "\
Examples:
  kvd codecs                         which codec to take
  kvd codecs --speed                 with attention timed for every preset
  kvd codecs --wide                  with spec, source and bits of every preset
  kvd codecs --kernels               which CPU kernel multiplies each preset
  kvd codecs --json | jq '.presets[] | select(.needs_calibration | not).name'";

pub(super) const BENCH: &str = "\
Examples:
  kvd bench attend --codec raw --codec kivi-4 --context 8192,32768
  kvd bench store --threads 1,2
  kvd bench attend --json > attend.json";

pub(super) const BENCH_ATTEND: &str = "\
Examples:
  kvd bench attend
  kvd bench attend --codec raw --codec kvd-2 --precision int8 --context 8192,32768
  kvd bench attend --shape qwen3-32b --batch 8 --ragged --wide";

pub(super) const BENCH_SCORES: &str = "\
Examples:
  kvd bench scores
  kvd bench scores --codec kivi-2 --context 32768";

pub(super) const BENCH_CODEC: &str = "\
Examples:
  kvd bench codec --codec kivi-4
  kvd bench codec --codec kvcomp --wide";

pub(super) const BENCH_STORE: &str = "\
Examples:
  kvd bench store
  kvd bench store --codec kvcomp --tokens 4096 --threads 1,2
  kvd bench store --errors none,rows,queries";

pub(super) const BENCH_SHARED: &str = "\
Examples:
  kvd bench shared --codec kivi-4 --sequences 16 --prefix 8192
  kvd bench shared --workers 4 --prefix 131072 --codec kvcomp --threads 2";

pub(super) const BENCH_CACHE: &str = "\
Examples:
  kvd bench cache
  kvd bench cache --entries 100000 --keys 512 --json";

#[cfg(feature = "eval")]
pub(super) const BENCH_TRANSPORT: &str = "\
Examples:
  kvd bench transport --context 64 --rounds 3
  kvd bench transport --codec kivi-4 --context 8192 --storing 1";

#[cfg(feature = "eval")]
pub(super) const BENCH_MIXED: &str = "\
Examples:
  kvd bench mixed --endpoint http://127.0.0.1:7070 --context 65536 --long 512
  kvd bench mixed --endpoint unix:/run/kvd/kvd.sock --flood 300 --writers 2";

pub(super) const PLAN: &str = "\
Examples:
  kvd plan --codec kvd-2 --device rtx4090
  kvd plan --tokens 32768 --batch 16 --table";

pub(super) const DASHBOARD: &str = "\
Example:
  kvd dashboard > kvd.json                        import it in Grafana";

pub(super) const METRICS: &str = "\
Examples:
  kvd metrics                                     all of them
  kvd metrics pool                                those with pool in their name
  kvd metrics --json";

#[cfg(feature = "eval")]
pub(super) const DEMO: &str = "\
Examples:
  kvd demo                                            all of it, some minutes
  kvd demo --codec kivi-4 --passages 1 --tokens 8     a few seconds
  kvd demo --codec kivi-4 --passages 1 --serve        then look at its metrics";

#[cfg(feature = "eval")]
pub(super) const EVAL: &str = "\
Examples:
  kvd eval                                            the codecs of `kvd demo`, each as it is
  kvd eval --codec kivi-4 --codec @my.policy --markdown quality.md --svg quality.svg
  kvd eval --search --budget-bits 2.5 --policy found.policy --artefact found.cal";

#[cfg(feature = "eval")]
pub(super) const CALIBRATE: &str = "\
Examples:
  kvd calibrate --codec kvd-4 --out kvd-4.cal --model DIR
  kvd calibrate --codec kvd-2 --out kvd-2.cal --endpoint http://localhost:7070 --sequence 1
  kvd calibrate --codec kvd-2 --out kvd-2.cal --samples rows.safetensors";
