//! `kvd codecs`: the presets, as a table.

use kvd_codec::{Quantizer, presets, resolve};
use kvd_core::{DType, Geometry, RopePairing, Side};
use std::fmt::Write;

/// The shape for which bits per value are given; they hardly depend on it.
const GEOMETRY: Geometry = Geometry {
    layers: 1,
    kv_heads: 1,
    head_dim_k: 128,
    head_dim_v: 128,
    block_tokens: 64,
    dtype: DType::F16,
    rope_pairing: RopePairing::Half,
};

/// Name, spec, stored bits, source and summary of every preset.
pub(super) fn table() -> String {
    let width = presets().iter().map(|preset| preset.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for preset in presets() {
        let spec = resolve(preset.name).expect("a test parses every preset");
        let mut lines = vec![preset.summary.to_owned(), preset.spec_text.to_owned()];
        for side in Side::BOTH {
            let of_side = spec.side(side);
            let bits = match of_side.quantizer {
                Quantizer::Grid { rate } => format!("about {rate}, everything counted, by its fit"),
                _ => of_side.implied_bits(&GEOMETRY, side).to_string(),
            };
            lines.push(format!("bits/value of {side}: {bits}"));
        }
        lines.push(format!("source: {}", preset.source));
        for (index, line) in lines.iter().enumerate() {
            let name = if index == 0 { preset.name } else { "" };
            writeln!(text, "{name:width$}  {line}").expect("write to a string");
        }
        text.push('\n');
    }
    let Geometry { head_dim_k: dim, block_tokens: tokens, .. } = GEOMETRY;
    writeln!(text, "Bits of full pages of {tokens} tokens and head size {dim}, without windows.")
        .expect("write to a string");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_listed_with_its_bits_and_source() {
        let table = table();
        for preset in presets() {
            assert!(table.contains(preset.name) && table.contains(preset.source));
        }
        assert!(table.contains("bits/value of k: 4.000 codes + 1.000 scales + 0.031 header"));
        assert!(table.contains("bits/value of v: codes depend on the data"));
        assert!(table.contains("bits/value of k: about 2.35, everything counted"));
    }
}
