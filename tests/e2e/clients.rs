//! Client processes: each is this test binary again, in the role of an engine.
//!
//! They meet at a gate: a child says `ready` on its standard output and goes on when it reads a
//! line on its standard input, so that all work at the same time.

use kvd_client::{ErrorCode, SequenceId};
use kvd_tests::codec::PRESETS;
use kvd_tests::engine::engine_at;
use kvd_tests::{
    LayerRows, ModelShape, StoredSequence, TestDaemon, TestEngine, TestRng, assert_refused,
    assert_within_budget, daemon, engine,
};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const SEED: u64 = 20_240_606;
const PREFIX: u32 = 100;

fn shape() -> ModelShape {
    ModelShape { layers: 2, group: 2, ..ModelShape::small_shape() }
}

/// The common prefix, as every process knows it.
fn prefix() -> Vec<LayerRows> {
    let mut rng = TestRng::new(SEED);
    (0..shape().layers).map(|_| LayerRows::random_rows(&shape(), PREFIX, &mut rng)).collect()
}

/// A role as its process is told it.
struct Role {
    endpoint: String,
    codec: String,
    parent: SequenceId,
    seed: u64,
}

impl Role {
    fn start(&self) -> Child {
        let this = std::env::current_exe().expect("this test's own path");
        Command::new(this)
            .args(["--exact", "a_client_process", "--ignored", "--nocapture"])
            .env("KVD_TEST_ENDPOINT", &self.endpoint)
            .env("KVD_TEST_CODEC", &self.codec)
            .env("KVD_TEST_PARENT", self.parent.to_string())
            .env("KVD_TEST_SEED", self.seed.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a client process")
    }

    fn of_this_process() -> Self {
        let get = |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
        Self {
            endpoint: get("KVD_TEST_ENDPOINT"),
            codec: get("KVD_TEST_CODEC"),
            parent: SequenceId(get("KVD_TEST_PARENT").parse().expect("an id")),
            seed: get("KVD_TEST_SEED").parse().expect("a seed"),
        }
    }
}

/// Says that it is ready and waits for the others.
fn gate() {
    let mut out = std::io::stdout();
    writeln!(out, "ready").expect("say ready");
    out.flush().expect("say ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("wait for go");
    assert_eq!(line, "go\n");
}

#[tokio::test]
#[ignore = "the role of a process that other tests start"]
async fn a_client_process() {
    let role = Role::of_this_process();
    let endpoint = role.endpoint.parse().unwrap();
    let engine = engine_at(endpoint).register_model(shape(), &role.codec).await;
    let mut rng = TestRng::new(role.seed);
    let parent = StoredSequence { sequence: role.parent, layers: prefix() };
    gate();
    // Own sequences and forks of the common one, interleaved.
    let mut own = engine.open_sequence().await;
    let mut fork = engine.fork_sequence(&parent, 90).await;
    for round in 0..40 {
        let context = format!("{}, round {round}, seed {}", role.codec, role.seed);
        let tokens = 1 + rng.next_below(12);
        for conversation in [&mut own, &mut fork] {
            engine.grow_sequence(conversation, tokens, &mut rng).await;
            check(&engine, conversation, &role.codec, &context, &mut rng).await;
        }
    }
    engine.close_sequence(own).await;
    engine.close_sequence(fork).await;
}

/// Over the rows as sent if the codec keeps them, else over the rows that are read back.
async fn check(
    engine: &TestEngine,
    of: &StoredSequence,
    codec: &str,
    context: &str,
    rng: &mut TestRng,
) {
    let question = engine.random_question(of, 1, rng);
    let answer = engine.ask_question(&question).await;
    let read = if codec == "raw" { of.layers[0].clone() } else { engine.load_layer(of, 0).await };
    assert_within_budget(context, engine, &question, &answer, &[&read]);
}

/// Starts the processes, lets them go together, and waits until all have succeeded.
fn run(roles: &[Role]) {
    let mut children: Vec<Child> = roles.iter().map(Role::start).collect();
    let mut outputs: Vec<_> = children
        .iter_mut()
        .map(|child| BufReader::new(child.stdout.take().expect("piped")).lines())
        .collect();
    for output in &mut outputs {
        let ready = |line: std::io::Result<String>| line.is_ok_and(|line| line.ends_with("ready"));
        assert!(output.any(ready), "a client process ended before it was ready");
    }
    for child in &mut children {
        let mut input = child.stdin.take().expect("piped");
        writeln!(input, "go").expect("say go");
    }
    for (mut child, output) in children.into_iter().zip(outputs) {
        let said: Vec<String> = output.map_while(Result::ok).collect();
        let status = child.wait().expect("wait for a client process");
        assert!(status.success(), "{status}: {said:#?}");
    }
}

/// Two processes on one daemon, for each codec; the parent's own sequence stays as it is.
async fn two_processes(daemon: TestDaemon, endpoints: [String; 2]) {
    for (index, codec) in PRESETS.into_iter().enumerate() {
        let engine = engine(&daemon).register_model(shape(), codec).await;
        let mut parent = engine.open_sequence().await;
        for (layer, rows) in prefix().iter().enumerate() {
            engine.store_rows(&mut parent, layer as u32, rows).await.expect("store");
        }
        let before = engine.load_layer(&parent, 0).await;
        let roles: Vec<Role> = endpoints
            .iter()
            .zip(0..)
            .map(|(endpoint, number)| Role {
                endpoint: endpoint.clone(),
                codec: codec.to_owned(),
                parent: parent.sequence,
                seed: SEED + 10 * index as u64 + number + 1,
            })
            .collect();
        tokio::task::spawn_blocking(move || run(&roles)).await.expect("both succeed");
        assert_eq!(engine.load_layer(&parent, 0).await, before, "{codec}");
        engine.close_sequence(parent).await;
        assert!(daemon.is_empty().await, "{codec}");
        engine.client.unregister_model(engine.model).await.expect("nobody uses it");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_store_and_attend_at_the_same_time() {
    let daemon = daemon().start().await;
    let endpoint = daemon.endpoint().to_string();
    two_processes(daemon, [endpoint.clone(), endpoint]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_on_tcp_and_one_on_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path: &Path = &folder.path().join("kvd.sock");
    let daemon = daemon().with_unix(path).start().await;
    let endpoints = [daemon.endpoint().to_string(), format!("unix:{}", path.display())];
    two_processes(daemon, endpoints).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_clients_of_one_process_do_not_disturb_each_other() {
    let daemon = daemon().start().await;
    let tasks: Vec<_> = (0..8u64)
        .map(|number| {
            let plan = engine(&daemon);
            tokio::spawn(async move {
                let codec = PRESETS[number as usize % PRESETS.len()];
                let engine = plan.with_name(codec).register_model(shape(), codec).await;
                let mut rng = TestRng::new(SEED + 100 + number);
                let mut conversation = engine.open_sequence().await;
                for round in 0..20 {
                    engine.grow_sequence(&mut conversation, 1 + rng.next_below(20), &mut rng).await;
                    let context = format!("client {number}, round {round}");
                    check(&engine, &conversation, codec, &context, &mut rng).await;
                }
                engine.close_sequence(conversation).await;
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(daemon.is_empty().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_registration_from_many_at_once_is_one_model() {
    let daemon = daemon().start().await;
    for round in 0..20 {
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let plan = engine(&daemon).with_name(&format!("round-{round}"));
                tokio::spawn(async move { plan.register_model(shape(), "raw").await.model })
            })
            .collect();
        let mut models = BTreeSet::new();
        for task in tasks {
            models.insert(task.await.unwrap());
        }
        assert_eq!(models.len(), 1, "round {round}");
    }
    assert_eq!(daemon.client().await.list_models().await.unwrap().len(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_unregistration_is_not_noticed_by_others() {
    let daemon = daemon().start().await;
    let engine = engine(&daemon).register_model(shape(), "raw").await;
    let mut conversation = engine.open_sequence().await;
    let mut rng = TestRng::new(SEED);
    let (client, model) = (daemon.client().await, engine.model);
    let rude = tokio::spawn(async move {
        for _ in 0..500 {
            let refused = client.unregister_model(model).await;
            assert_refused(refused, ErrorCode::ModelInUse, "1 open sequences");
        }
    });
    while !rude.is_finished() {
        engine.grow_sequence(&mut conversation, 1, &mut rng).await;
        check(&engine, &conversation, "raw", "beside a refused call", &mut rng).await;
    }
    rude.await.unwrap();
}
