//! An assignment as a codec with overrides, and as a policy file.

use crate::eval::WindowChoice;
use crate::fits;
use kvd_codec::{CodecSpec, SideSpec, SpecOverride};
use kvd_core::Side;
use std::fmt::Write;

/// The codec that gives layer `i` the side specs `layers[i]`, keys first. The spec that most
/// layers have is the codec's own, the others are overrides.
pub(super) fn policy_codec(layers: &[[SideSpec; 2]], windows: WindowChoice) -> CodecSpec {
    let own = |side: Side| {
        let specs = layers.iter().map(|layer| &layer[side.index()]);
        let count = |spec: &SideSpec| specs.clone().filter(|other| *other == spec).count();
        // The first of several: `max_by_key` would take the last.
        let most = specs.clone().map(count).max().unwrap_or(0);
        specs.clone().find(|spec| count(spec) == most).cloned().unwrap_or_else(fits::raw_side)
    };
    let (key, value) = (own(Side::Key), own(Side::Value));
    let mut overrides: Vec<SpecOverride> = Vec::new();
    for side in Side::BOTH {
        let own = if side == Side::Key { &key } else { &value };
        for (layer, specs) in (0u32..).zip(layers) {
            let spec = &specs[side.index()];
            if spec == own {
                continue;
            }
            let next = overrides.last_mut().filter(|last| {
                let follows = last.layers.as_ref().is_some_and(|range| range.end() + 1 == layer);
                last.side == side && follows && last.spec == *spec
            });
            match next {
                Some(last) => last.layers = last.layers.as_ref().map(|r| *r.start()..=layer),
                None => overrides.push(SpecOverride {
                    side,
                    layers: Some(layer..=layer),
                    heads: None,
                    spec: spec.clone(),
                }),
            }
        }
    }
    windows.apply_windows(CodecSpec { overrides, ..fits::two_side_codec(key, value) })
}

/// The policy file: comments, then one item per line.
pub(super) fn policy_file(spec: &CodecSpec, comments: &[String]) -> String {
    let mut text = String::new();
    for comment in comments {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# {comment}");
    }
    text + &spec.to_string().replace("; ", ";\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(text: &str) -> SideSpec {
        kvd_codec::resolve_spec(&format!("k={text}; v=raw")).unwrap().key
    }

    #[test]
    fn the_common_spec_is_the_codecs_own_and_neighbours_share_an_override() {
        let (a, b) = (side("fp8"), side("uniform(b=4,axis=token)"));
        let layers = [
            [b.clone(), a.clone()],
            [a.clone(), a.clone()],
            [a.clone(), b.clone()],
            [a.clone(), b.clone()],
            [b, a],
        ];
        let windows = WindowChoice::Same { sink: 4, recent: 8 };
        let spec = policy_codec(&layers, windows);
        let text = "k=fp8; v=fp8; k[layer=0]=uniform(b=4,axis=token); \
                    k[layer=4]=uniform(b=4,axis=token); v[layer=2-3]=uniform(b=4,axis=token); \
                    sink=4; recent=8";
        assert_eq!(text.parse::<CodecSpec>().unwrap(), spec);
        for (layer, specs) in (0..).map(kvd_core::LayerIndex).zip(&layers) {
            for side in Side::BOTH {
                assert_eq!(spec.side_at(side, layer, 0), &specs[side.index()]);
            }
        }
    }

    #[test]
    fn a_policy_file_is_read_as_written() {
        let spec = kvd_codec::resolve_spec("k=fp8; v=raw; k[layer=1]=raw; sink=2").unwrap();
        let text = policy_file(&spec, &["one; two".to_owned(), "three".to_owned()]);
        assert!(text.starts_with("# one; two\n# three\nk=fp8;\n"), "{text}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        std::fs::write(&path, text).unwrap();
        assert_eq!(crate::eval::EvalCodec::from_file(&path).unwrap().spec, spec);
    }
}
