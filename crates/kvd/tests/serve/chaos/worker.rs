//! One worker: it stores, attends, forks, truncates, publishes and attaches by chance, and checks
//! every answer. It ends only when it is killed, or with a wrong answer.

use super::rows::{self, CHANNELS, KV_HEADS, LAYERS, PAGE_TOKENS, Q_HEADS, RowSource};
use super::{connect, flood};
use bytes::Bytes;
use fastrand::Rng;
use kvd_client::{
    AttendBatch, AttendQuery, Attended, BlockKeys, Client, ClientError, DType, ErrorCode,
    HeldSession, LayerIndex, LoadRange, ModelId, ModelSpec, Namespace, RegionClient, RegionOptions,
    SequenceId, SessionOptions, StoreAck, StoreChunk,
};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

pub(super) const SOCKET_VARIABLE: &str = "KVD_CHAOS_FOLDER";
pub(super) const SEED_VARIABLE: &str = "KVD_CHAOS_WORKER";
/// The deadline of every call.
pub(super) const DEADLINE: Duration = Duration::from_secs(4);
/// Time beyond the deadline after which a call is late; the machine may be busy.
const LATE: Duration = Duration::from_secs(2);
pub(super) const TENANTS: u64 = 3;
pub(super) const CODECS: [&str; 4] = ["raw", "kivi-4", "fp8", "kvcomp"];
/// Texts that workers store.
const CONTENTS: u64 = 6;
const SEQUENCES_MAX: usize = 4;
const TOKENS_MAX: u32 = 700;
/// Error of rows that are decoded; rows of another token or text are off by more than 1.
const ROWS_ERROR_MAX: f64 = 0.25;
/// Error of an answer over the rows that the daemon decodes.
const OUTPUT_ERROR_MAX: f64 = 0.02;

/// Counts time in which this process runs; one that is stopped does not age.
#[derive(Clone)]
struct AwakeClock(Arc<AtomicU64>);

impl AwakeClock {
    const TICK: Duration = Duration::from_millis(20);

    fn start() -> Self {
        let ticks = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&ticks);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Self::TICK);
                counted.fetch_add(1, Relaxed);
            }
        });
        Self(ticks)
    }

    fn elapsed(&self) -> Duration {
        Self::TICK * u32::try_from(self.0.load(Relaxed)).expect("a short life")
    }
}

/// A sequence and what it must hold.
struct StoredText {
    id: SequenceId,
    content: u64,
    length: u32,
}

/// Why a worker's round ended.
enum RoundEnd {
    /// Nothing is left of what it held: the daemon was restarted, or its session has ended.
    Lost,
    /// The call may succeed later.
    Later(Duration),
    /// The answer is wrong, or an error that nothing explains.
    Wrong(String),
}

/// All that a worker has of one daemon.
struct WorkerState {
    client: Client,
    /// A region that stores and attends go through, for some workers.
    region: Option<RegionClient>,
    session: HeldSession,
    model: ModelId,
    is_exact: bool,
    texts: Vec<StoredText>,
}

/// The process that the test starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of the chaos test"]
async fn run_worker_process() {
    let (Some(folder), Ok(seed)) =
        (std::env::var_os(SOCKET_VARIABLE), std::env::var(SEED_VARIABLE))
    else {
        return;
    };
    let seed: u64 = seed.parse().expect("a seed");
    let worker = ChaosWorker {
        folder: PathBuf::from(folder),
        seed,
        random: Rng::with_seed(seed),
        clock: AwakeClock::start(),
        checks: 0,
    };
    worker.run_forever().await;
}

pub(super) async fn register_model(client: &Client, codec: &str) -> Result<ModelId, ClientError> {
    let (name, codec) = (format!("chaos-{codec}"), codec.to_owned());
    let spec = ModelSpec { name, geometry: rows::geometry(), codec, calibration: Bytes::new() };
    Ok(client.register_model(spec).await?.model)
}

struct ChaosWorker {
    folder: PathBuf,
    seed: u64,
    random: Rng,
    clock: AwakeClock,
    checks: u64,
}

impl ChaosWorker {
    async fn run_forever(mut self) {
        let mut state = None;
        loop {
            let end = match &mut state {
                None => match self.open_state().await {
                    Ok(opened) => {
                        state = Some(opened);
                        continue;
                    }
                    Err(error) => self.explain_error(error, None).await,
                },
                Some(known) => match self.act(known).await {
                    Ok(()) => continue,
                    Err(end) => end,
                },
            };
            match end {
                RoundEnd::Lost => state = None,
                RoundEnd::Later(pause) => tokio::time::sleep(pause).await,
                RoundEnd::Wrong(what) => {
                    // Nobody reads it where the test is over.
                    let _ = writeln!(std::io::stdout(), "WRONG {what}");
                    std::process::exit(3);
                }
            }
        }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn tenant(&self) -> u64 {
        self.seed % TENANTS
    }

    async fn open_state(&mut self) -> Result<WorkerState, ClientError> {
        let socket = self.socket("kvd.sock");
        let client = connect(&socket, self.tenant()).await?;
        if self.seed.is_multiple_of(7) {
            flood::flood_daemon(&client, &socket, self.seed).await?;
        }
        let codec = CODECS[self.seed as usize % CODECS.len()];
        let model = register_model(&client, codec).await?;
        let name = format!("worker-{}", self.seed);
        let options = SessionOptions::new(name).with_ttl(Duration::from_millis(400));
        let session = client.hold_session(options.with_take_over()).await?;
        let region = if self.random.bool() {
            Some(open_region(&self.socket("regions.sock"), self.tenant())?)
        } else {
            None
        };
        let is_exact = codec == "raw";
        Ok(WorkerState { client, region, session, model, is_exact, texts: Vec::new() })
    }

    /// One step.
    async fn act(&mut self, state: &mut WorkerState) -> Result<(), RoundEnd> {
        let step = self.random.u32(0..12);
        let before = self.clock.elapsed();
        let result = match (step, state.texts.is_empty()) {
            (0, _) | (_, true) => self.open_text(state).await,
            (1..=4, _) => self.append_rows(state).await,
            (5 | 6, _) => self.check_attention(state).await,
            (7, _) => self.check_rows(state).await,
            (8, _) => self.fork_text(state).await,
            (9, _) => self.truncate_text(state).await,
            (10, _) => self.publish_text(state).await,
            _ => self.close_text(state).await,
        };
        // Four calls at most make a step.
        let taken = self.clock.elapsed() - before;
        if taken > 4 * DEADLINE + LATE {
            return Err(RoundEnd::Wrong(format!("step {step} took {taken:?}: {result:?}")));
        }
        match result {
            Ok(()) => Ok(()),
            Err(StepError::Call(error)) => Err(self.explain_error(error, Some(state)).await),
            Err(StepError::Wrong(what)) => Err(RoundEnd::Wrong(what)),
        }
    }

    /// A refused call: what a worker does then.
    async fn explain_error(&self, error: ClientError, state: Option<&WorkerState>) -> RoundEnd {
        use ErrorCode::{Cancelled, DeadlineExceeded, LimitExceeded, PoolFull, ShuttingDown};
        if error.restarted.is_some() {
            return RoundEnd::Lost;
        }
        let Some(code) = error.code else {
            if !error.is_retryable() {
                return RoundEnd::Wrong(format!("a broken connection is {error:?}"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            // The region of a daemon that is gone stays broken.
            return match state {
                Some(state) if state.region.is_none() => RoundEnd::Later(Duration::ZERO),
                _ => RoundEnd::Lost,
            };
        };
        let pause = error.retry_after.unwrap_or(Duration::from_millis(5));
        if code == PoolFull {
            // Whoever keeps what it has waits for the others for ever.
            tokio::time::sleep(pause).await;
            return RoundEnd::Lost;
        }
        if code.is_retryable()
            || matches!(code, Cancelled | DeadlineExceeded | LimitExceeded | ShuttingDown)
        {
            return RoundEnd::Later(pause.min(Duration::from_millis(200)));
        }
        use ErrorCode::{UnknownModel, UnknownSequence, UnknownSession};
        if matches!(code, UnknownModel | UnknownSequence | UnknownSession) {
            // A session that was not held for its time takes its sequences with it. That of a
            // flooder ends with its connection, which floods may cost it.
            let Some(state) = state else { return RoundEnd::Lost };
            let ended = tokio::time::timeout(DEADLINE, state.session.wait_for_end()).await;
            if ended.is_ok() {
                return RoundEnd::Lost;
            }
        }
        RoundEnd::Wrong(format!("an error that nothing explains: {error}"))
    }

    async fn open_text(&mut self, state: &mut WorkerState) -> StepResult {
        if state.texts.len() >= SEQUENCES_MAX {
            return self.close_text(state).await;
        }
        let content = self.random.u64(0..CONTENTS);
        let (session, mut length) = (state.session.session_id(), 0);
        let id = if self.random.bool() {
            state.session.open_sequence(state.model).await?
        } else {
            let keys = chain_keys(content, TOKENS_MAX / PAGE_TOKENS);
            let opened =
                state.client.open_on_prefix(state.model, keys, Some(session), None).await?;
            length = opened.length;
            opened.sequence
        };
        state.texts.push(StoredText { id, content, length });
        Ok(())
    }

    fn choose(&mut self, state: &WorkerState) -> usize {
        self.random.usize(0..state.texts.len())
    }

    /// Where a text is cut. A page that is cut inside is packed again from its decoded rows
    /// (contract 24) and loses each time, so that nothing could be said of rows that are not exact.
    fn choose_cut(&mut self, state: &WorkerState, length: u32) -> u32 {
        let at = self.random.u32(0..=length);
        if state.is_exact { at } else { at - at % PAGE_TOKENS }
    }

    async fn append_rows(&mut self, state: &mut WorkerState) -> StepResult {
        let chosen = self.choose(state);
        let StoredText { id, content, length } = state.texts[chosen];
        let tokens = self.random.u32(1..200).min(TOKENS_MAX.saturating_sub(length));
        if tokens == 0 {
            return self.close_text(state).await;
        }
        for layer in 0..LAYERS {
            let rows =
                |is_value| RowSource { content, layer, is_value }.row_bytes(length, tokens).into();
            let (k, v) = (rows(false), rows(true));
            let chunk =
                StoreChunk { sequence: id, layer: LayerIndex(layer), start: length, tokens, k, v };
            match state.store_rows(chunk).await {
                Ok(ack) if ack.length == length + tokens => {}
                Ok(ack) => return Err(StepError::Wrong(format!("{ack:?} after {tokens} tokens"))),
                Err(error) => {
                    // Layers of different lengths: it is given up.
                    state.texts.swap_remove(chosen);
                    // An error of the close is that of the store again.
                    let _ = state.client.close_sequence(id).await;
                    return Err(error.into());
                }
            }
        }
        state.texts[chosen].length += tokens;
        Ok(())
    }

    async fn check_attention(&mut self, state: &mut WorkerState) -> StepResult {
        let StoredText { id, length, .. } = state.texts[self.choose(state)];
        if length == 0 {
            return Ok(());
        }
        let layer = LayerIndex(self.random.u32(0..LAYERS));
        let q: Vec<f32> = (0..Q_HEADS * CHANNELS).map(|_| 2.0 * self.random.f32() - 1.0).collect();
        let mut bytes = vec![0; q.len() * 4];
        DType::F32.narrow_values(&q, &mut bytes);
        let batch = AttendBatch {
            model: state.model,
            layer,
            q_heads: Q_HEADS as u32,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: vec![AttendQuery::new(id, 1)],
            q: bytes.into(),
            per_query_errors: false,
        };
        let attended = state.attend_rows(batch).await?;
        let range =
            LoadRange { sequence: id, layer, start: 0, end: length, dtype: Some(DType::F32) };
        let rows = state.client.load_rows(range).await?;
        let (out, lse) = rows::attend_exactly(&q, &widen(&rows.k), &widen(&rows.v));
        let error = rows::relative_error(&widen(&attended.out), &out);
        let lse_error =
            lse.iter().zip(&attended.lse).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        let is_right = error <= OUTPUT_ERROR_MAX && lse_error <= 0.02;
        if !is_right {
            return Err(StepError::Wrong(format!(
                "attention over {length} tokens errs by {error} and {lse_error}"
            )));
        }
        self.count_check();
        Ok(())
    }

    async fn check_rows(&mut self, state: &mut WorkerState) -> StepResult {
        let StoredText { id, content, length } = state.texts[self.choose(state)];
        if length == 0 {
            return Ok(());
        }
        let start = self.random.u32(0..length);
        let end = self.random.u32(start..length) + 1;
        let layer = self.random.u32(0..LAYERS);
        let dtype = Some(DType::F32);
        let range = LoadRange { sequence: id, layer: LayerIndex(layer), start, end, dtype };
        let rows = state.client.load_rows(range).await?;
        let most = if state.is_exact { 0.0 } else { ROWS_ERROR_MAX };
        for (found, is_value) in [(&rows.k, false), (&rows.v, true)] {
            let wanted = RowSource { content, layer, is_value }.row_values(start, end - start);
            let error = rows::relative_error(&widen(found), &wanted);
            let is_right = error <= most;
            if !is_right {
                return Err(StepError::Wrong(format!(
                    "tokens {start}..{end} of layer {layer}, value {is_value}, err by {error}"
                )));
            }
        }
        self.count_check();
        Ok(())
    }

    async fn fork_text(&mut self, state: &mut WorkerState) -> StepResult {
        if state.texts.len() >= SEQUENCES_MAX {
            return self.close_text(state).await;
        }
        let StoredText { id, content, length } = state.texts[self.choose(state)];
        let at = self.choose_cut(state, length);
        let child = state.client.fork_sequence(id, Some(at)).await?;
        if child.length != at {
            return Err(StepError::Wrong(format!("{child:?} where {at} tokens were asked for")));
        }
        state.texts.push(StoredText { id: child.sequence, content, length: at });
        Ok(())
    }

    async fn truncate_text(&mut self, state: &mut WorkerState) -> StepResult {
        let chosen = self.choose(state);
        let at = self.choose_cut(state, state.texts[chosen].length);
        let id = state.texts[chosen].id;
        let answer = state.client.truncate_sequence(id, at).await;
        if answer.is_ok() {
            state.texts[chosen].length = at;
        } else {
            // Whether it was cut is not known.
            state.texts.swap_remove(chosen);
        }
        Ok(answer?)
    }

    async fn publish_text(&mut self, state: &mut WorkerState) -> StepResult {
        let StoredText { id, content, length } = state.texts[self.choose(state)];
        if length < PAGE_TOKENS {
            return Ok(());
        }
        let keys = chain_keys(content, length / PAGE_TOKENS);
        state.client.publish_blocks(id, 0, keys.clone()).await?;
        let lease = Duration::from_millis(self.random.u64(0..500));
        state.client.match_prefixes(state.model, &[keys], lease).await?;
        Ok(())
    }

    async fn close_text(&mut self, state: &mut WorkerState) -> StepResult {
        let chosen = self.choose(state);
        let StoredText { id, .. } = state.texts.swap_remove(chosen);
        Ok(state.client.close_sequence(id).await?)
    }

    fn count_check(&mut self) {
        self.checks += 1;
        let mut out = std::io::stdout().lock();
        // A pipe that nobody reads any more: the test is over.
        let _ = writeln!(out, "checks {}", self.checks);
    }
}

impl WorkerState {
    async fn store_rows(&self, chunk: StoreChunk) -> Result<StoreAck, ClientError> {
        match &self.region {
            Some(region) => tokio::task::block_in_place(|| region.store_once(chunk)),
            None => self.client.store_chunk(chunk).await,
        }
    }

    async fn attend_rows(&self, batch: AttendBatch) -> Result<Attended, ClientError> {
        let dims = [CHANNELS as u32; 2];
        match &self.region {
            Some(region) => tokio::task::block_in_place(|| region.attend_once(batch, dims)),
            None => self.client.attend_batch(batch).await,
        }
    }
}

fn open_region(path: &Path, tenant: u64) -> Result<RegionClient, ClientError> {
    let namespace = Namespace::new(&format!("tenant-{tenant}")).expect("a namespace");
    let mut options = RegionOptions::default().with_bytes(1 << 20).with_namespace(&namespace);
    options.timeout = Some(DEADLINE);
    RegionClient::open_region(path, &options)
}

/// Keys of the pages of a text.
fn chain_keys(content: u64, pages: u32) -> BlockKeys {
    let key = |page| [content, u64::from(page)].map(u64::to_be_bytes).concat();
    BlockKeys { keys: (0..pages).flat_map(key).collect(), key_bytes: 16, key_tokens: 0 }
}

fn widen(bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / 4];
    DType::F32.widen_values(bytes, &mut values);
    values
}

/// Why a step did not succeed.
#[derive(Debug)]
enum StepError {
    Call(ClientError),
    Wrong(String),
}

impl From<ClientError> for StepError {
    fn from(error: ClientError) -> Self {
        Self::Call(error)
    }
}

type StepResult = Result<(), StepError>;

// KV heads are what the daemon stores, query heads what it answers.
const _: () = assert!(Q_HEADS.is_multiple_of(KV_HEADS));
