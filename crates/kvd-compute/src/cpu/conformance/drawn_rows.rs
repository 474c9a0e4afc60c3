//! Scores of a few kinds of patterns and values that share a direction, drawn from a seed: weights
//! that lose alike, and values that add those losses up.

/// How the tokens of an input weigh, and what their values share.
#[derive(Clone, Copy, Debug)]
pub(super) struct DrawnRows {
    /// Each so many tokens one has a large weight.
    period: usize,
    /// How far below its score those of the others are.
    depth: f32,
    direction: Direction,
    holders: Holders,
    /// The size of what values do not share.
    rest: f32,
}

/// A part that values share.
#[derive(Clone, Copy, Debug)]
enum Direction {
    Ones,
    /// Ones and minus ones.
    Signs,
    /// One channel.
    Spike,
    /// The first half of the channels.
    HalfOnes,
}

/// Which tokens share it.
#[derive(Clone, Copy, Debug)]
enum Holders {
    All,
    /// Those of small weights.
    Small,
    /// Those too, and the others its opposite.
    Opposite,
    /// Every other one, and the rest its opposite.
    Alternate,
}

impl DrawnRows {
    pub(super) fn from_seed(seed: u64) -> Self {
        let mut state = seed;
        let mut draw = |count: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99_991);
            (state >> 33) % count
        };
        Self {
            period: [2, 3, 8, 16, 64][draw(5) as usize],
            depth: 6.0 + draw(900) as f32 / 100.0,
            direction: match draw(4) {
                0 => Direction::Ones,
                1 => Direction::Signs,
                2 => Direction::Spike,
                _ => Direction::HalfOnes,
            },
            holders: match draw(4) {
                0 => Holders::All,
                1 => Holders::Small,
                2 => Holders::Opposite,
                _ => Holders::Alternate,
            },
            rest: [0.0, 1e-3, 0.05, 0.3][draw(4) as usize],
        }
    }

    /// The score of a token.
    pub(super) fn score_of(&self, token: usize) -> f32 {
        if token.is_multiple_of(self.period) { 0.0 } else { -self.depth }
    }

    /// Gives a row of noise the part that it shares with others.
    pub(super) fn shape_value(&self, token: usize, row: &mut [f32]) {
        let large = token.is_multiple_of(self.period);
        let share = match self.holders {
            Holders::All => 1.0,
            Holders::Small => f32::from(u8::from(!large)),
            Holders::Opposite => {
                if large {
                    -1.0
                } else {
                    1.0
                }
            }
            Holders::Alternate => {
                if token.is_multiple_of(2) {
                    1.0
                } else {
                    -1.0
                }
            }
        };
        let dim = row.len();
        for (channel, value) in row.iter_mut().enumerate() {
            let part = match self.direction {
                Direction::Ones => 1.0,
                Direction::Signs => {
                    if (channel * channel / 3).is_multiple_of(2) {
                        1.0
                    } else {
                        -1.0
                    }
                }
                Direction::Spike => {
                    if channel == 5 {
                        (dim as f32).sqrt()
                    } else {
                        0.0
                    }
                }
                Direction::HalfOnes => f32::from(u8::from(channel < dim / 2)),
            };
            *value = self.rest * *value + share * part;
        }
    }
}
