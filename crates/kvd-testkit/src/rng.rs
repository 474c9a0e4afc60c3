//! Numbers that look random and are the same in every run of one seed.

/// `SplitMix64` (Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub struct TestRng(u64);

impl TestRng {
    /// A sequence of its own for each seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn next_word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// `0 <= x < 1`.
    pub fn next_unit(&mut self) -> f64 {
        (self.next_word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// `0 <= x < bound`; 0 for a bound of 0.
    pub fn next_below(&mut self, bound: u32) -> u32 {
        (self.next_unit() * f64::from(bound)) as u32
    }

    /// Mean 0, variance 1 (Box and Muller).
    pub fn next_normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.next_unit()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.next_unit()).cos()) as f32
    }

    /// `count` normal numbers.
    pub fn next_normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next_normal()).collect()
    }
}
