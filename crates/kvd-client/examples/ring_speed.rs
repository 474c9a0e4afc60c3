//! How long one attend takes by gRPC, by a region's messages and by its ring, in turns, from a
//! process of its own: `ring_speed ENDPOINT REGION_SOCKET CONTEXT SPIN_US WAY...`, where a way is
//! `unary`, `region` or `ring`. All ways answer the same, or it fails.
#![expect(clippy::print_stdout, reason = "its figures are for a person to read")]

use kvd_client::{
    AttendBatch, AttendQuery, AttendRing, Client, DType, Endpoint, Geometry, LayerIndex, ModelSpec,
    RegionClient, RegionOptions, RingLayout, RingOptions, RopePairing, StoreChunk,
};
use std::sync::Arc;
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
const DIMS: [u32; 2] = [128, 128];
const Q_HEADS: u32 = 32;
const TURNS: usize = 101;
const CALLS: usize = 50;

type SpeedError = Box<dyn std::error::Error>;

/// A way to a daemon.
enum SpeedWay {
    Unary(Box<Client>),
    Region(Box<RegionClient>),
    Ring(Box<RingWay>),
}

/// A ring, and the places of its one attend.
struct RingWay {
    ring: AttendRing,
    at: RingLayout,
    out: Vec<u8>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), SpeedError> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, socket, context, spin, ways @ ..] = &words[..] else {
        return Err("ring_speed ENDPOINT REGION_SOCKET CONTEXT SPIN_US WAY...".into());
    };
    let client = Client::connect(endpoint.parse::<Endpoint>()?).await?;
    let batch = store_context(&client, context.parse()?).await?;
    let right = client.attend_batch(batch.clone()).await?;
    let options = RegionOptions::default();
    let mut measured = Vec::new();
    for way in ways {
        let opened = match way.as_str() {
            "unary" => SpeedWay::Unary(Box::new(client.clone())),
            "region" => SpeedWay::Region(Box::new(RegionClient::open_region(socket, &options)?)),
            "ring" => {
                let region = Arc::new(RegionClient::open_region(socket, &options)?);
                let spin = Duration::from_micros(spin.parse()?);
                let mut ring =
                    AttendRing::open_ring(region, RingOptions::default().with_spin(spin))?;
                if ring.attend_once(&batch, DIMS)? != right {
                    return Err("the ring answers otherwise".into());
                }
                let at = RingLayout::pack_from(ring.free_from(), &batch, DIMS);
                let out = vec![0; right.out.len()];
                SpeedWay::Ring(Box::new(RingWay { ring, at, out }))
            }
            other => return Err(format!("{other} is no way").into()),
        };
        measured.push((way, opened, Vec::new()));
    }
    for _ in 0..TURNS {
        for (_, way, times) in &mut measured {
            let began = Instant::now();
            for _ in 0..CALLS {
                way.attend_once(&batch).await?;
            }
            times.push(began.elapsed().as_secs_f64() * 1e6 / CALLS as f64);
        }
    }
    println!("{TURNS} turns of {CALLS} calls: best, lower quartile and median of turns, us");
    for (name, _, mut times) in measured {
        times.sort_unstable_by(f64::total_cmp);
        let [best, low, median] = [0, TURNS / 4, TURNS / 2].map(|at| times[at]);
        println!("{name:<8} {best:8.1} {low:8.1} {median:8.1}");
    }
    Ok(())
}

async fn store_context(client: &Client, context: u32) -> Result<AttendBatch, SpeedError> {
    let spec = ModelSpec {
        name: "ring-speed".to_owned(),
        geometry: GEOMETRY,
        codec: "kivi-4".to_owned(),
        calibration: bytes::Bytes::new(),
    };
    let model = client.register_model(spec).await?.model;
    let sequence = client.open_sequence(model).await?;
    // 1.0 in f16.
    let rows = bytes::Bytes::from([0x00, 0x3c].repeat((context * 8 * 128) as usize));
    let layer = LayerIndex(0);
    let (k, v) = (rows.clone(), rows);
    client.store_chunk(StoreChunk { sequence, layer, start: 0, tokens: context, k, v }).await?;
    Ok(AttendBatch {
        model,
        layer,
        q_heads: Q_HEADS,
        dtype: DType::F16,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: [0x00, 0x3c].repeat((Q_HEADS * 128) as usize).into(),
        per_query_errors: false,
    })
}

impl SpeedWay {
    async fn attend_once(&mut self, batch: &AttendBatch) -> Result<(), SpeedError> {
        match self {
            Self::Unary(client) => drop(client.attend_batch(batch.clone()).await?),
            Self::Region(region) => drop(region.attend_once(batch.clone(), DIMS)?),
            Self::Ring(way) => {
                let RingWay { ring, at, out } = &mut **way;
                let memory = ring.shared_region().memory();
                memory.write_bytes(at.q.offset, &batch.q)?;
                ring.submit_attend(0, batch, at)?;
                ring.wait_reply()?.result?;
                ring.shared_region().memory().read_bytes(at.out.offset, out)?;
            }
        }
        Ok(())
    }
}
