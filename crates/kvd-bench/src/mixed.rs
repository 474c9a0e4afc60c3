//! Clients of several kinds at once against a daemon that runs: how long each waits for its answer
//! beside the others.

use crate::data::NormalValues;
use crate::{BenchError, HeadShape};
use kvd_client::{
    AttendBatch, AttendQuery, Client, ClientError, ClientOptions, Endpoint, ModelSpec, Namespace,
    StoreChunk,
};
use kvd_core::{DType, ErrorCode, LayerIndex, ModelId, ProgressLines, SequenceId};
use serde::Serialize;
use std::convert::Infallible;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Tokens of one store.
const STORE_TOKENS: u32 = 1024;
/// Time between two steps of what is told of the time that is over.
const TOLD_EVERY: Duration = Duration::from_millis(250);
/// Tokens after which a writer begins its sequence anew.
const WRITER_TOKENS: u32 = 8 * STORE_TOKENS;

/// Load that `kvd bench mixed` measures.
#[derive(Clone, Debug)]
pub struct MixedBench {
    /// The daemon.
    pub endpoint: Endpoint,
    /// How clients connect, and who they are.
    pub options: ClientOptions,
    /// Their namespace.
    pub namespace: Namespace,
    /// Heads.
    pub shape: HeadShape,
    /// The codec, a preset or spec that needs no calibration.
    pub codec: String,
    /// Stored tokens, all of which long attends and the flood see.
    pub context: u32,
    /// Clients that ask for few tokens one call after another, each on a connection.
    pub clients: usize,
    /// Stored tokens that such a client sees.
    pub tokens: u32,
    /// Pause of such a client between two calls.
    pub think: Duration,
    /// Calls that one more client has under way all the time.
    pub flood: usize,
    /// Query tokens of an attend that one more client asks for again and again.
    pub long: u32,
    /// Clients that store all the time.
    pub writers: usize,
    /// How long all of it lasts.
    pub time: Duration,
}

/// One line of the answer: all clients of a kind.
#[derive(Clone, Debug, Serialize)]
pub struct MixedRow {
    /// Work of these clients.
    pub kind: &'static str,
    /// Number of clients.
    pub clients: usize,
    /// Calls that were answered.
    pub calls: usize,
    /// Calls that were refused, to be sent again.
    pub refused: usize,
    /// Half of the calls took no more, milliseconds.
    pub p50_ms: f64,
    /// 99 of 100 took no more.
    pub p99_ms: f64,
    /// 999 of 1000 took no more.
    pub p999_ms: f64,
    /// The longest.
    pub most_ms: f64,
    /// Jain's index of the calls of each client: 1 where all have as many.
    pub jain: f64,
}

/// Times and refusals of one client.
#[derive(Default)]
struct ClientTimes {
    ms: Vec<f64>,
    refused: usize,
}

impl ClientTimes {
    /// Takes what came of a call that began then.
    fn note_answer<T>(
        &mut self,
        began: Instant,
        answer: Result<T, ClientError>,
    ) -> Result<(), BenchError> {
        match answer {
            Ok(_) => self.ms.push(began.elapsed().as_secs_f64() * 1e3),
            Err(error)
                if matches!(error.code, Some(ErrorCode::QueueFull | ErrorCode::QuotaExceeded)) =>
            {
                self.refused += 1;
            }
            Err(error) => return Err(BenchError::failed_step("call")(error)),
        }
        Ok(())
    }
}

/// Model and sequence that all clients work on.
#[derive(Clone)]
struct LoadTarget {
    bench: MixedBench,
    model: ModelId,
    sequence: SequenceId,
    end: Instant,
}

impl MixedBench {
    /// Registers a model, stores a sequence, lets all clients work, and closes both again.
    ///
    /// # Errors
    /// When the daemon cannot be reached, or refuses anything but for want of a place.
    pub async fn run_load(&self) -> Result<Vec<MixedRow>, BenchError> {
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench mixed, storing", u64::from(self.context));
        let client = self.connect_client().await?;
        let spec = ModelSpec {
            name: format!("bench-mixed-{}", std::process::id()),
            geometry: self.shape.layer_geometry(64),
            codec: self.codec.clone(),
            calibration: bytes::Bytes::new(),
        };
        let model =
            client.register_model(spec).await.map_err(BenchError::codec_error(&self.codec))?.model;
        let sequence =
            client.open_sequence(model).await.map_err(BenchError::failed_step("open"))?;
        for start in (0..self.context).step_by(STORE_TOKENS as usize) {
            let tokens = STORE_TOKENS.min(self.context - start);
            let stored = client.store_chunk(self.draw_chunk(sequence, start, tokens)).await;
            stored.map_err(BenchError::failed_step("store"))?;
            progress.add_steps(u64::from(tokens));
        }
        let target =
            LoadTarget { bench: self.clone(), model, sequence, end: Instant::now() + self.time };
        let measured = tokio::select! {
            measured = target.measure_clients() => measured,
            never = tell_time(&progress, self.time) => match never {},
        };
        client.close_sequence(sequence).await.map_err(BenchError::failed_step("close"))?;
        client.unregister_model(model).await.map_err(BenchError::failed_step("unregister"))?;
        measured
    }

    async fn connect_client(&self) -> Result<Client, BenchError> {
        let client = Client::connect_with(self.endpoint.clone(), &self.options).await;
        let client = client.map_err(BenchError::failed_step("connect"))?;
        Ok(client.with_namespace(&self.namespace))
    }

    fn draw_chunk(&self, sequence: SequenceId, start: u32, tokens: u32) -> StoreChunk {
        let heads = tokens as usize * self.shape.kv_heads as usize;
        let mut normal = NormalValues::new(3);
        let k = normal.draw_bytes(heads * self.shape.head_dim_k as usize, 1.0);
        let v = normal.draw_bytes(heads * self.shape.head_dim_v as usize, 1.0);
        StoreChunk { sequence, layer: LayerIndex(0), start, tokens, k, v }
    }
}

impl LoadTarget {
    async fn measure_clients(&self) -> Result<Vec<MixedRow>, BenchError> {
        let bench = &self.bench;
        let mut rows = Vec::new();
        let mut kinds = Vec::new();
        let few = AttendQuery {
            start: Some(0),
            end: Some(bench.tokens),
            ..AttendQuery::new(self.sequence, 1)
        };
        let steady: Vec<_> =
            (0..bench.clients).map(|_| self.clone().ask_repeatedly(few, 1, bench.think)).collect();
        kinds.push(("few tokens", spawn_all(steady)));
        let flood = AttendQuery::new(self.sequence, 1);
        let flood = (bench.flood > 0)
            .then(|| self.clone().ask_repeatedly(flood, bench.flood, Duration::ZERO));
        kinds.push(("flood", spawn_all(flood.into_iter().collect())));
        let long = AttendQuery::new(self.sequence, bench.long);
        let long = (bench.long > 0).then(|| self.clone().ask_repeatedly(long, 1, Duration::ZERO));
        kinds.push(("long attend", spawn_all(long.into_iter().collect())));
        let (mut stored, writers) = (JoinSet::new(), bench.writers);
        (0..writers).for_each(|_| drop(stored.spawn(self.clone().store_repeatedly())));
        for (kind, mut clients) in kinds {
            rows.extend(row_of_kind(kind, join_clients(&mut clients).await?));
        }
        rows.extend(row_of_kind("store", join_clients(&mut stored).await?));
        Ok(rows)
    }

    /// One client with so many calls under way.
    async fn ask_repeatedly(
        self,
        query: AttendQuery,
        under_way: usize,
        think: Duration,
    ) -> Result<ClientTimes, BenchError> {
        let client = self.bench.connect_client().await?;
        let batch = self.build_batch(query);
        let mut callers = JoinSet::new();
        for _ in 0..under_way {
            let (client, batch, end) = (client.clone(), batch.clone(), self.end);
            callers.spawn(async move {
                let mut seen = ClientTimes::default();
                while Instant::now() < end {
                    let began = Instant::now();
                    let answer = client.attend_batch(batch.clone()).await;
                    let hint = answer.as_ref().err().and_then(|error| error.retry_after);
                    seen.note_answer(began, answer)?;
                    tokio::time::sleep(hint.unwrap_or(think)).await;
                }
                Ok(seen)
            });
        }
        let mut all = ClientTimes::default();
        for seen in join_clients(&mut callers).await? {
            all.ms.extend(seen.ms);
            all.refused += seen.refused;
        }
        Ok(all)
    }

    /// One client that stores.
    async fn store_repeatedly(self) -> Result<ClientTimes, BenchError> {
        let client = self.bench.connect_client().await?;
        let failed = || BenchError::failed_step("writer");
        let sequence = client.open_sequence(self.model).await.map_err(failed())?;
        let chunk = self.bench.draw_chunk(sequence, 0, STORE_TOKENS);
        let (mut seen, mut start) = (ClientTimes::default(), 0);
        while Instant::now() < self.end {
            let began = Instant::now();
            seen.note_answer(
                began,
                client.store_chunk(StoreChunk { start, ..chunk.clone() }).await,
            )?;
            start += STORE_TOKENS;
            if start == WRITER_TOKENS {
                client.truncate_sequence(sequence, 0).await.map_err(failed())?;
                start = 0;
            }
        }
        client.close_sequence(sequence).await.map_err(failed())?;
        Ok(seen)
    }

    fn build_batch(&self, query: AttendQuery) -> AttendBatch {
        let shape = &self.bench.shape;
        let q_heads = shape.kv_heads * shape.group;
        let values = query.n_q as usize * q_heads as usize * shape.head_dim_k as usize;
        AttendBatch {
            model: self.model,
            layer: LayerIndex(0),
            q_heads,
            dtype: DType::F16,
            scale: None,
            soft_cap: None,
            queries: vec![query],
            q: NormalValues::new(5).draw_bytes(values, 1.0),
            per_query_errors: false,
        }
    }
}

/// Tells how much of the time is over, until it is dropped.
async fn tell_time(progress: &ProgressLines, time: Duration) -> Infallible {
    progress.begin_task("bench mixed", time.div_duration_f64(TOLD_EVERY).ceil() as u64);
    let mut ticks = tokio::time::interval(TOLD_EVERY);
    loop {
        ticks.tick().await;
        progress.add_steps(1);
    }
}

type ClientTasks = JoinSet<Result<ClientTimes, BenchError>>;

fn spawn_all(
    clients: Vec<impl Future<Output = Result<ClientTimes, BenchError>> + Send + 'static>,
) -> ClientTasks {
    let mut set = JoinSet::new();
    clients.into_iter().for_each(|client| drop(set.spawn(client)));
    set
}

async fn join_clients(clients: &mut ClientTasks) -> Result<Vec<ClientTimes>, BenchError> {
    let mut all = Vec::new();
    while let Some(seen) = clients.join_next().await {
        all.push(seen.map_err(BenchError::failed_step("client"))??);
    }
    Ok(all)
}

/// The line of a kind; none where nobody is of it.
fn row_of_kind(kind: &'static str, clients: Vec<ClientTimes>) -> Option<MixedRow> {
    if clients.is_empty() {
        return None;
    }
    let counts: Vec<f64> = clients.iter().map(|seen| seen.ms.len() as f64).collect();
    let mut ms: Vec<f64> = clients.iter().flat_map(|seen| &seen.ms).copied().collect();
    ms.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let last = ms.len().checked_sub(1)?;
        ms.get((last as f64 * share) as usize).copied()
    };
    let [p50_ms, p99_ms, p999_ms, most_ms] =
        [0.5, 0.99, 0.999, 1.0].map(|share| at(share).unwrap_or(f64::NAN));
    Some(MixedRow {
        kind,
        clients: clients.len(),
        calls: ms.len(),
        refused: clients.iter().map(|seen| seen.refused).sum(),
        p50_ms,
        p99_ms,
        p999_ms,
        most_ms,
        jain: jain_index(&counts),
    })
}

/// Jain's fairness index: 1 where all have as much, `1 / n` where one has all.
fn jain_index(counts: &[f64]) -> f64 {
    let (sum, squares) = counts.iter().fold((0.0, 0.0), |(a, b), x| (a + x, b + x * x));
    if squares > 0.0 { sum * sum / (counts.len() as f64 * squares) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_is_one_of_equals_and_least_where_one_has_all() {
        assert!((jain_index(&[5.0, 5.0, 5.0]) - 1.0).abs() < 1e-12);
        assert!((jain_index(&[9.0, 0.0, 0.0]) - 1.0 / 3.0).abs() < 1e-12);
        assert!((jain_index(&[1.0, 3.0]) - 0.8).abs() < 1e-12);
    }

    #[test]
    fn a_line_has_the_percentiles_of_all_clients_of_a_kind() {
        let of = |from: u32, refused| ClientTimes {
            ms: (from..from + 50).map(f64::from).collect(),
            refused,
        };
        let row = row_of_kind("few tokens", vec![of(0, 2), of(50, 1)]).unwrap();
        assert_eq!((row.clients, row.calls, row.refused), (2, 100, 3));
        assert_eq!((row.p50_ms, row.p99_ms, row.most_ms, row.jain), (49.0, 98.0, 99.0, 1.0));
        assert!(row_of_kind("flood", Vec::new()).is_none());
    }
}
