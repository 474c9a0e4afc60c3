//! How long one unary attend takes by several doors, in turns: `door_speed CA TOKEN_FILE CONTEXT
//! NAME=ENDPOINT...`. CA and TOKEN_FILE are files, or `-`; the token is shown at doors whose name
//! ends in `+token`. The first door is the one that others are compared with.
#![expect(clippy::print_stdout, reason = "its figures are for a person to read")]

use kvd_client::{
    AttendBatch, AttendQuery, BearerToken, Client, ClientOptions, DType, Endpoint, Geometry,
    LayerIndex, ModelSpec, RopePairing, StoreChunk, TlsOptions,
};
use std::time::{Duration, Instant};

const GEOMETRY: Geometry = Geometry {
    layers: 1,
    kv_heads: 8,
    head_dim_k: 128,
    head_dim_v: 128,
    block_tokens: 64,
    dtype: DType::F16,
    rope_pairing: RopePairing::Half,
};
const Q_HEADS: u32 = 32;
const TURNS: usize = 601;
const CALLS: usize = 20;
/// Tokens of one store.
const STORE_TOKENS: u32 = 256;

type SpeedError = Box<dyn std::error::Error>;

/// A way to a daemon, and what its turns took.
struct MeasuredDoor {
    name: String,
    client: Client,
    batch: AttendBatch,
    store: StoreChunk,
    /// Mean of a call, and of a store, in each turn.
    attends: Vec<Duration>,
    stores: Vec<Duration>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), SpeedError> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [ca, token, context, doors @ ..] = &words[..] else {
        return Err("door_speed CA TOKEN_FILE CONTEXT NAME=ENDPOINT...".into());
    };
    let mut measured = Vec::new();
    for door in doors {
        let (name, endpoint) = door.split_once('=').ok_or("NAME=ENDPOINT")?;
        let mut options = ClientOptions::default();
        if ca != "-" {
            options = options.with_tls(TlsOptions::default().with_ca(std::fs::read(ca)?));
        }
        if name.ends_with("+token") {
            let token = BearerToken::new(&std::fs::read_to_string(token)?).ok_or("no token")?;
            options = options.with_token(token);
        }
        let client = Client::connect_with(endpoint.parse::<Endpoint>()?, &options).await?;
        measured.push(MeasuredDoor::open_door(name, client, context.parse()?).await?);
    }
    let doors = measured.len();
    for turn in 0..TURNS {
        // Each begins as often as any other: who follows whom matters on a busy machine.
        for at in 0..doors {
            measured[(turn + at) % doors].measure_turn().await?;
        }
    }
    println!("{TURNS} turns of {CALLS} calls: lower quartile and median, us; over the first door");
    let quartiles = |times: &[Duration]| [4, 2].map(|part| time_at(times, part));
    let first = quartiles(&measured[0].attends);
    let first_store = quartiles(&measured[0].stores);
    for door in &measured {
        let attend = describe_times(quartiles(&door.attends), first);
        let store = describe_times(quartiles(&door.stores), first_store);
        println!("{:<12} attend {attend}   store of {STORE_TOKENS} tokens {store}", door.name);
    }
    Ok(())
}

/// The time that one of `part` turns took at most, in microseconds.
fn time_at(times: &[Duration], part: usize) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / part].as_secs_f64() * 1e6
}

fn describe_times(times: [f64; 2], first: [f64; 2]) -> String {
    let [low, median] = times;
    format!("{low:7.1} {median:7.1}  {:.3} {:.3}", low / first[0], median / first[1])
}

impl MeasuredDoor {
    /// A sequence of so many tokens behind a door.
    async fn open_door(name: &str, client: Client, context: u32) -> Result<Self, SpeedError> {
        let spec = ModelSpec {
            name: format!("door/{}", name.replace('+', "-")),
            geometry: GEOMETRY,
            codec: "kivi-4".to_owned(),
            calibration: bytes::Bytes::new(),
        };
        let model = client.register_model(spec).await?.model;
        let sequence = client.open_sequence(model).await?;
        let chunk = |start, tokens: u32| {
            // 1.0 in f16.
            let rows = [0x00, 0x3c].repeat((tokens * 8 * 128) as usize);
            StoreChunk {
                sequence,
                layer: LayerIndex(0),
                start,
                tokens,
                k: rows.clone().into(),
                v: rows.into(),
            }
        };
        for start in (0..context).step_by(STORE_TOKENS as usize) {
            client.store_chunk(chunk(start, STORE_TOKENS.min(context - start))).await?;
        }
        let batch = AttendBatch {
            model,
            layer: LayerIndex(0),
            q_heads: Q_HEADS,
            dtype: DType::F16,
            scale: None,
            soft_cap: None,
            queries: vec![AttendQuery::new(sequence, 1)],
            q: [0x00, 0x3c].repeat((Q_HEADS * 128) as usize).into(),
            per_query_errors: false,
        };
        let (name, store) = (name.to_owned(), chunk(0, STORE_TOKENS.min(context)));
        Ok(Self { name, client, batch, store, attends: Vec::new(), stores: Vec::new() })
    }

    async fn measure_turn(&mut self) -> Result<(), SpeedError> {
        let began = Instant::now();
        for _ in 0..CALLS {
            self.client.attend_batch(self.batch.clone()).await?;
        }
        self.attends.push(began.elapsed() / CALLS as u32);
        let began = Instant::now();
        for _ in 0..CALLS / 10 {
            // The same range again: it travels, is compared, and stays as it is.
            self.client.store_chunk(self.store.clone()).await?;
        }
        self.stores.push(began.elapsed() / (CALLS / 10) as u32);
        Ok(())
    }
}
