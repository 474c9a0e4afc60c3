//! Calls with rows of noise, and how far apart the answers of two devices to them are.
use kvd_client::{
    AttendBatch, AttendQuery, Attended, DType, Geometry, LayerIndex, LoadRange, ModelId, ModelSpec,
    RopePairing, SequenceId, StoreChunk,
};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The one layer.
pub const LAYER: LayerIndex = LayerIndex(0);
/// Twice what each backend is held to against a reference in f64, in units of the values' root mean
/// square (0.58).
pub const MOST_APART: f32 = 2e-5 * 0.58;

/// One layer of a model, whose queries are f32.
#[derive(Clone, Copy)]
pub struct CallShape {
    /// KV heads.
    pub kv_heads: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Channels of keys and of values.
    pub dim: u32,
    /// Tokens of a page.
    pub block_tokens: u32,
    /// Type of the values of rows.
    pub dtype: DType,
}

impl CallShape {
    /// The model of one layer under a name, with a codec.
    #[must_use]
    pub fn model_spec(&self, name: &str, codec: &str) -> ModelSpec {
        let geometry = Geometry {
            layers: 1,
            kv_heads: self.kv_heads,
            head_dim_k: self.dim,
            head_dim_v: self.dim,
            block_tokens: self.block_tokens,
            dtype: self.dtype,
            rope_pairing: RopePairing::Half,
        };
        let (name, codec) = (name.to_owned(), codec.to_owned());
        ModelSpec { name, geometry, codec, calibration: bytes::Bytes::new() }
    }

    /// Rows of noise between -1 and 1.
    fn noise_rows(&self, seed: u32, start: u32, tokens: u32, heads: u32, dtype: DType) -> Vec<u8> {
        let row = heads * self.dim;
        let value = |i: u32| {
            let bits = (i + seed * 1_000_003).wrapping_mul(2_654_435_761);
            ((bits ^ bits >> 15).wrapping_mul(2_246_822_519) >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let values: Vec<f32> = (start * row..(start + tokens) * row).map(value).collect();
        let mut bytes = vec![0; values.len() * dtype.size_bytes()];
        dtype.narrow_values(&values, &mut bytes);
        bytes
    }

    /// Tokens of noise for the layer, by a seed of the sequence.
    #[must_use]
    pub fn store_chunk(
        &self,
        sequence: SequenceId,
        seed: u32,
        start: u32,
        tokens: u32,
    ) -> StoreChunk {
        let of = |seed| self.noise_rows(seed, start, tokens, self.kv_heads, self.dtype).into();
        let (k, v) = (of(2 * seed), of(2 * seed + 1));
        StoreChunk { sequence, layer: LAYER, start, tokens, k, v }
    }

    /// One query of each sequence, which sees all of it.
    #[must_use]
    pub fn attend_batch(&self, model: ModelId, sequences: &[SequenceId]) -> AttendBatch {
        let queries: Vec<_> = sequences.iter().map(|id| AttendQuery::new(*id, 1)).collect();
        let dtype = DType::F32;
        let q = self.noise_rows(99, 0, queries.len() as u32, self.q_heads, dtype).into();
        let (q_heads, scale, soft_cap) = (self.q_heads, None, None);
        AttendBatch {
            model,
            layer: LAYER,
            q_heads,
            dtype,
            scale,
            soft_cap,
            queries,
            q,
            per_query_errors: false,
        }
    }

    /// The first tokens of a sequence.
    #[must_use]
    pub fn load_range(sequence: SequenceId, end: u32) -> LoadRange {
        LoadRange { sequence, layer: LAYER, start: 0, end, dtype: None }
    }
}

/// Little-endian f32 values.
#[must_use]
pub fn read_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
}

/// How far apart two answers are where they are farthest.
///
/// # Panics
/// Where their lengths differ, or a value is not finite.
#[must_use]
pub fn largest_distance(a: &Attended, b: &Attended) -> f32 {
    let (a_out, b_out) = (read_floats(&a.out), read_floats(&b.out));
    assert_eq!((a_out.len(), a.lse.len()), (b_out.len(), b.lse.len()));
    assert!(a_out.iter().chain(&a.lse).all(|value| value.is_finite()));
    let pairs = a_out.iter().zip(&b_out).chain(a.lse.iter().zip(&b.lse));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// `GET` of the admin port: status and text.
///
/// # Panics
/// Where it does not answer in HTTP within 20 seconds.
#[must_use]
pub fn get_page(admin: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(admin).expect("the admin port");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let request = format!("GET {path} HTTP/1.1\r\nhost: kvd\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("ask");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, text) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status");
    (status.parse().expect("a number"), text.to_owned())
}
