//! Queries, keys and values that are bad for integers.

use super::drawn_rows::DrawnRows;
use super::*;

/// Tokens of all blocks.
pub(super) const TOKENS: usize = 176;

/// How an input is bad.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum HostileInput {
    /// One channel of the queries is so large; keys are so much smaller there.
    QueryChannel(f32, f32),
    /// Three channels are, of different sizes.
    QueryChannels,
    /// Three channels of the queries are so many times the others, and keep more bits than f16 has;
    /// keys are so many times the others there.
    QueryChannelsBy(f32, f32),
    /// Channels of queries grow over so many decades as those of keys get smaller.
    ChannelDecades(f32),
    /// The first channel of the queries is so large, the others are all so large; keys are ones but
    /// in the first channel.
    AlikeChannels(f32, f32),
    /// The channels of each half are alike, with signs of their own; keys follow the signs.
    AlikeHalves(f32, f32),
    /// Two pairs of channels of the keys have biases of that norm, turned by RoPE.
    KeyPairs(f32),
    /// A bias of that norm on the keys, turned by RoPE.
    KeyBias(f32),
    /// Logits of about that.
    Logits(f32),
    /// One channel of the values is so large.
    ValueChannel(f32),
    /// One row of the values is so large.
    ValueRow(f32),
    /// The token that has most of the weight has a value of zeros.
    EmptySink,
    /// Beside such a token all others are alike, and all values of one sign.
    EqualWeights(f32),
    /// Everything is so small.
    Tiny(f32),
    /// Values have a common part of one beside such differences, and scores differ much.
    CommonPart(f32),
    /// So do those of the tokens with small weights alone.
    CommonPartOfSmall(f32),
    /// One token has most of the weight, and so do the values of every other token of the rest.
    CommonPartOfHalf(f32),
    /// Half the tokens weigh half a unit and share one large channel; the others' values are so
    /// many times noise, as are those of the token that weighs most.
    SpikesOfHalf(f32),
    /// Values are one large channel, a fourth of all from the last, with signs of their own.
    SignedSpikes,
    /// All tokens weigh alike; their values are ones or minus ones and add up to next to nothing.
    CancellingSigns,
    /// Magnitudes over twelve decades: of channels of queries, keys and values, of rows of values.
    Decades(u64),
    /// Weights that lose alike and values that add that up.
    Drawn(u64),
}

pub(super) const KINDS: &[HostileInput] = &[
    HostileInput::QueryChannel(128.0, 0.01),
    HostileInput::QueryChannel(448.0, 0.01),
    HostileInput::QueryChannel(4096.0, 0.01),
    HostileInput::QueryChannel(4096.0, 0.0),
    HostileInput::QueryChannel(1e6, 1e-3),
    HostileInput::QueryChannels,
    HostileInput::QueryChannelsBy(3000.0, 1e-4),
    HostileInput::QueryChannelsBy(3000.0, 1.0),
    HostileInput::ChannelDecades(8.0),
    HostileInput::AlikeChannels(5.0, 0.469),
    HostileInput::AlikeHalves(5.0, 0.469),
    HostileInput::KeyBias(1000.0),
    HostileInput::KeyPairs(1000.0),
    HostileInput::Logits(1e5),
    HostileInput::Logits(-1e5),
    HostileInput::ValueChannel(1e4),
    HostileInput::ValueRow(1e4),
    HostileInput::EmptySink,
    HostileInput::EqualWeights(5.7),
    HostileInput::EqualWeights(7.0),
    HostileInput::Tiny(1e-4),
    HostileInput::CommonPart(0.05),
    HostileInput::CommonPartOfSmall(0.05),
    HostileInput::CommonPartOfHalf(0.05),
    HostileInput::Decades(1),
    HostileInput::Decades(2),
    HostileInput::Decades(3),
];

/// `10^u` for `u` between -6 and 6.
fn decades(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..count).map(|_| 10f32.powf(12.0 * draw() - 6.0)).collect()
}

impl HostileInput {
    /// Rows that f16 has no room for.
    pub(super) fn dtype(self) -> DType {
        if matches!(self, Self::Decades(_)) { DType::F32 } else { DType::F16 }
    }

    /// Whether queries come as an engine hands them over in f16.
    fn has_half_queries(self) -> bool {
        !matches!(
            self,
            Self::QueryChannelsBy(..)
                | Self::ChannelDecades(_)
                | Self::AlikeChannels(..)
                | Self::AlikeHalves(..)
                | Self::KeyPairs(_)
        )
    }

    pub(super) fn queries(self, dim: usize, rows: usize) -> Vec<f32> {
        let mut q = values(rows * dim, 5);
        for (index, row) in q.chunks_exact_mut(dim).enumerate() {
            match self {
                Self::QueryChannel(large, _) => row[3] = large,
                Self::QueryChannels => {
                    (row[1], row[dim / 2], row[dim - 3]) = (700.0, -2500.0, 90.0);
                }
                Self::QueryChannelsBy(factor, _) => {
                    [3, dim / 2 + 8, dim - 3].into_iter().for_each(|at| row[at] *= factor);
                }
                Self::ChannelDecades(decades) => {
                    for (at, q) in row.iter_mut().enumerate() {
                        *q *= 10f32.powf(decades * (at as f32 / (dim - 1) as f32 - 0.5));
                    }
                }
                Self::AlikeChannels(first, others) => {
                    row.fill(others);
                    row[0] = first;
                }
                Self::AlikeHalves(first, others) => {
                    row.iter_mut().for_each(|q| *q = others.copysign(*q));
                    row[dim / 2..].iter_mut().for_each(|q| *q *= 0.731);
                    row[0] = first;
                }
                Self::Logits(size) => {
                    let sign = if size < 0.0 { -1.0 } else { 1.0 };
                    let factor = sign * (size.abs() / (dim as f32).sqrt()).sqrt();
                    row.iter_mut().for_each(|q| *q = factor * (1.0 + 0.1 * *q));
                }
                Self::EmptySink
                | Self::EqualWeights(_)
                | Self::CommonPartOfSmall(_)
                | Self::CommonPartOfHalf(_) => row[0] = 8.0,
                Self::Tiny(size) => row.iter_mut().for_each(|q| *q *= size),
                Self::Decades(seed) => {
                    row.iter_mut().zip(decades(dim, seed)).for_each(|(q, size)| *q *= size);
                }
                Self::Drawn(_) => row[0] = (dim as f32).sqrt(),
                Self::SpikesOfHalf(_) => row[0] = (dim as f32).sqrt() * (1.0 + 0.03 * index as f32),
                _ => {}
            }
        }
        if self.has_half_queries() {
            to_half_all(&mut q);
        }
        q
    }

    /// Rows of K and V of a block's tokens.
    pub(super) fn rows(
        self,
        (dim_k, dim_v): (usize, usize),
        block: u64,
        tokens: u32,
    ) -> [Vec<f32>; 2] {
        let mut keys = values(tokens as usize * HEADS * dim_k, 2 * block);
        let mut rows = values(tokens as usize * HEADS * dim_v, 2 * block + 1);
        let token = |index: usize| block as usize * 64 + index / HEADS;
        for (index, key) in keys.chunks_exact_mut(dim_k).enumerate() {
            self.shape_key(token(index), key);
        }
        for (index, row) in rows.chunks_exact_mut(dim_v).enumerate() {
            self.shape_value(token(index), row);
        }
        [keys, rows]
    }

    fn shape_key(self, token: usize, key: &mut [f32]) {
        let dim = key.len();
        match self {
            Self::QueryChannel(_, factor) => key[3] *= factor,
            Self::QueryChannels => {
                [1, dim / 2, dim - 3].into_iter().for_each(|at| key[at] *= 0.01);
            }
            Self::QueryChannelsBy(_, factor) => {
                [3, dim / 2 + 8, dim - 3].into_iter().for_each(|at| key[at] *= factor);
            }
            Self::ChannelDecades(decades) => {
                for (at, k) in key.iter_mut().enumerate() {
                    *k *= 10f32.powf(decades * (0.5 - at as f32 / (dim - 1) as f32));
                }
            }
            Self::AlikeChannels(..) => key[1..].fill(1.0),
            Self::AlikeHalves(..) => {
                let signs = self.queries(dim, 1);
                key.iter_mut().zip(signs).for_each(|(k, q)| *k = k.abs().copysign(q));
            }
            Self::KeyPairs(norm) => {
                for (pair, share) in [(dim / 2 - 4, 0.8), (dim / 2 - 14, 0.6)] {
                    let angle = token as f32 * 1e6f32.powf(-2.0 * pair as f32 / dim as f32);
                    key[pair] += share * norm * angle.cos();
                    key[pair + dim / 2] += share * norm * angle.sin();
                }
            }
            Self::KeyBias(norm) => {
                let bias = norm / (dim as f32).sqrt();
                for pair in 0..dim / 2 {
                    let angle = token as f32 * 10000f32.powf(-2.0 * pair as f32 / dim as f32);
                    let (sin, cos) = (angle + pair as f32).sin_cos();
                    key[pair] += bias * 2f32.sqrt() * cos;
                    key[pair + dim / 2] += bias * 2f32.sqrt() * sin;
                }
            }
            Self::Logits(size) => {
                let factor = (size.abs() / (dim as f32).sqrt()).sqrt();
                key.iter_mut().for_each(|k| *k = factor * (1.0 + 0.1 * *k));
            }
            Self::EmptySink => key[0] = if token == 20 { 12.0 } else { -1.0 },
            Self::EqualWeights(above) => {
                key.iter_mut().zip(values(dim, 9)).for_each(|(key, alike)| *key = alike);
                key[0] = if token == 20 { above - 1.0 } else { -1.0 };
            }
            Self::Tiny(size) => key.iter_mut().for_each(|k| *k *= size),
            Self::CommonPart(_) => key.iter_mut().for_each(|k| *k *= 3.0),
            Self::CommonPartOfSmall(_) => key[0] = small_score(token),
            Self::CancellingSigns => key.fill(1.0),
            Self::CommonPartOfHalf(_) => key[0] = if token == 20 { 0.0 } else { key[0] - 8.0 },
            Self::Decades(seed) => {
                key.iter_mut().zip(decades(dim, seed + 1)).for_each(|(k, size)| *k *= size);
            }
            Self::SpikesOfHalf(_) => {
                key.fill(0.0);
                key[0] = if token == 20 { 0.0 } else { -11.1 };
            }
            Self::Drawn(seed) => {
                key.fill(0.0);
                key[0] = DrawnRows::from_seed(seed).score_of(token);
            }
            _ => {}
        }
    }

    fn shape_value(self, token: usize, row: &mut [f32]) {
        let dim = row.len();
        match self {
            Self::ValueChannel(factor) => row[7] *= factor,
            Self::ValueRow(factor) if token == 33 => {
                row.iter_mut().for_each(|v| *v *= factor);
            }
            Self::EmptySink | Self::EqualWeights(_) if token == 20 => row.fill(0.0),
            Self::EqualWeights(_) => row.iter_mut().for_each(|v| *v = 1.0 + 0.1 * v.abs()),
            Self::Tiny(size) => row.iter_mut().for_each(|v| *v *= size),
            Self::CommonPart(rest) => row.iter_mut().for_each(|v| *v = 1.0 + rest * *v),
            Self::CommonPartOfSmall(rest) if small_score(token) < 0.0 => {
                row.iter_mut().for_each(|v| *v = 1.0 + rest * *v);
            }
            Self::CommonPartOfHalf(rest) if token.is_multiple_of(2) => {
                row.iter_mut().for_each(|v| *v = 1.0 + rest * *v);
            }
            Self::SpikesOfHalf(rest) => {
                row.iter_mut().for_each(|v| *v *= rest);
                row[5] += if token.is_multiple_of(2) { 0.0 } else { (dim as f32).sqrt() };
            }
            Self::SignedSpikes => {
                let size = (dim as f32).sqrt().copysign(row[0]);
                row.iter_mut().for_each(|v| *v *= 0.05);
                row[dim - dim / 4] += size;
            }
            Self::CancellingSigns => row.fill(if token.is_multiple_of(2) { 1.0 } else { -1.0 }),
            Self::Decades(seed) => {
                let factor = decades(TOKENS * 2, seed + 2)[token];
                let sizes = decades(dim, seed + 3);
                row.iter_mut().zip(sizes).for_each(|(v, size)| *v *= size * factor);
            }
            Self::Drawn(seed) => DrawnRows::from_seed(seed).shape_value(token, row),
            _ => {}
        }
    }
}

/// A score of 0 for one token in sixteen, and of others that weigh less than half a unit each.
fn small_score(token: usize) -> f32 {
    if token.is_multiple_of(16) { 0.0 } else { -11.5 }
}

/// Rounds to eleven bits each.
pub(super) fn to_half_all(values: &mut [f32]) {
    for value in values {
        let mut wide = [f64::from(*value)];
        to_half(&mut wide);
        *value = wide[0] as f32;
    }
}
