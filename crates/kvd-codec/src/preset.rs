//! Named codecs: papers' settings, baselines, and kvd's own.

use crate::parse::{self, FirstWord};
use crate::{CodecSpec, SpecError};

/// A named codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Name on the command line, in the registration and in metric labels.
    pub name: &'static str,
    /// The codec as a spec text.
    pub spec_text: &'static str,
    /// Where the setting comes from.
    pub source: &'static str,
    /// One line for a list.
    pub summary: &'static str,
    /// When to take it, after "choose it when", in at most 36 characters.
    pub choose_when: &'static str,
}

static PRESETS: [Preset; 27] = [
    Preset {
        name: "raw",
        spec_text: "k=raw; v=raw",
        source: "baseline",
        summary: "values in the precision in which they arrive",
        choose_when: "nothing may change, nothing is saved",
    },
    Preset {
        name: "fp8",
        spec_text: "k=fp8; v=fp8",
        source: "baseline",
        summary: "FP8 e4m3 with one power-of-two scale per page",
        choose_when: "hardly anything may change",
    },
    Preset {
        name: "kivi-4",
        spec_text: "k=uniform(b=4,g=32,axis=channel); v=uniform(b=4,g=32,axis=token); recent=128",
        source: "KIVI (arXiv 2402.02750), 4 bit, groups of 32",
        summary: "asymmetric 4 bit: keys per channel, values per token",
        choose_when: "first try: no calibration",
    },
    Preset {
        name: "kivi-2",
        spec_text: "k=uniform(b=2,g=32,axis=channel); v=uniform(b=2,g=32,axis=token); recent=128",
        source: "KIVI (arXiv 2402.02750), 2 bit, groups of 32",
        summary: "asymmetric 2 bit: keys per channel, values per token",
        choose_when: "3 to 5 x without a calibration",
    },
    Preset {
        name: "kvcomp",
        spec_text: "k=uniform(rel=0.05,axis=block)/huffman; v=uniform(rel=0.15,axis=token)/huffman",
        source: "KVComp §4.2.1, BlockQuant 0.05 / TokenQuant 0.15",
        summary: "relative-step uniform codes, one range per key page, Huffman",
        choose_when: "you compare with KVComp",
    },
    Preset {
        name: "kvcomp-channel",
        spec_text: "k=uniform(rel=0.25,axis=channel)/huffman; \
                    v=uniform(rel=0.15,axis=token)/huffman",
        source: "KVComp §4.2.1, ChannelQuant 0.25 / TokenQuant 0.15",
        summary: "relative-step uniform codes, one range per key channel and page, Huffman",
        choose_when: "you compare with KVComp",
    },
    Preset {
        name: "vecinfer-4",
        spec_text: "k=smooth+hadamard/vq(d=2,b=8); v=vq(d=2,b=8); recent=128",
        source: "VecInfer Tables 3 and 8, 4 bit (d2b8)",
        summary: "smoothed, rotated keys and plain values in pairs of channels",
        choose_when: "you compare with VecInfer",
    },
    Preset {
        name: "vecinfer-3",
        spec_text: "k=smooth+hadamard/vq(d=4,b=12); v=vq(d=4,b=12); recent=128",
        source: "VecInfer Table 2, 3 bit (d4b12)",
        summary: "as vecinfer-2 with tables of 4096 entries",
        choose_when: "you compare with VecInfer",
    },
    Preset {
        name: "vecinfer-2",
        spec_text: "k=smooth+hadamard/vq(d=4,b=8); v=vq(d=4,b=8); recent=128",
        source: "VecInfer §3.2 and §4, 2 bit (d=4, b=8)",
        summary: "vector quantization of smoothed, rotated keys and plain values",
        choose_when: "2 bits by codebooks",
    },
    Preset {
        name: "vecinfer-2-reg",
        spec_text: "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4); recent=128",
        source: "VecInfer Table 5, 2 bit (d2b4)",
        summary: "as vecinfer-2 with tables of 16 entries, which fit registers",
        choose_when: "speed at 2 bits counts most",
    },
    Preset {
        name: "vecinfer-1.5",
        spec_text: "k=smooth+hadamard/vq(d=8,b=12); v=vq(d=8,b=12); recent=128",
        source: "VecInfer Table 2 and §4.4, 1.5 bit (d8b12)",
        summary: "as vecinfer-2 with 4096 entries of 8 channels",
        choose_when: "memory counts more than quality",
    },
    Preset {
        name: "vecinfer-1.25",
        spec_text: "k=smooth+hadamard/vq(d=8,b=12); v=vq(d=8,b=8); recent=128",
        source: "VecInfer Table 2, 1.25 bit (K-d8b12/V-d8b8)",
        summary: "1.5 bit keys, 1 bit values",
        choose_when: "the least memory, at most loss",
    },
    Preset {
        name: "cq-4",
        spec_text: "k=vq(d=2,b=8,scope=group); v=vq(d=2,b=8,scope=group)",
        source: "VQ-LLM Table II, CQ-4: VQ<2,8,1> per channel group",
        summary: "a codebook for each pair of channels, no transform",
        choose_when: "you compare with CQ",
    },
    Preset {
        name: "cq-2",
        spec_text: "k=vq(d=4,b=8,scope=group); v=vq(d=4,b=8,scope=group)",
        source: "VQ-LLM Table II, CQ-2: VQ<4,8,1> per channel group",
        summary: "a codebook for each four channels, no transform",
        choose_when: "you compare with CQ",
    },
    Preset {
        name: "vq-residual-4",
        spec_text: "k=smooth+hadamard/vq(d=4,b=8,stages=2); \
                    v=vq(d=4,b=8,stages=2); recent=128",
        source: "VQ-LLM §II-A, 4 bit in two stages as QuiP#-4 of Table II",
        summary: "a second codebook for what the first leaves over",
        choose_when: "you compare residual codebooks",
    },
    Preset {
        name: "innerq-2",
        spec_text: "k=norm/uniform(b=2,g=32,axis=token,mode=hybrid); \
                    v=uniform(b=2,g=32,axis=channel,mode=hybrid); sink=32; recent=96",
        source: "InnerQ §5.1, 2 bit, groups of 32 along the inner dimension",
        summary: "2 bit, the better of symmetric and asymmetric levels in every group",
        choose_when: "you compare with InnerQ",
    },
    Preset {
        name: "polar-4+4",
        spec_text: "k=polar(a=4,r=4); v=uniform(b=4,g=32,axis=token); recent=128",
        source: "PolarQuant §4.1 and Table 3, m4n4; the paper leaves values alone: here KIVI's",
        summary: "keys as angles and radii of rotary pairs, one calibrated scale per pair",
        choose_when: "you compare with PolarQuant",
    },
    Preset {
        name: "polar-4+2",
        spec_text: "k=polar(a=4,r=2,g=64); v=uniform(b=2,g=32,axis=token); recent=64",
        source: "PolarQuant §4.2 and Table 5, m4n2; the paper leaves values alone: here KIVI's",
        summary: "keys as angles and radii of rotary pairs, a scale per pair and 64 tokens",
        choose_when: "you compare with PolarQuant",
    },
    Preset {
        name: "turbo-4",
        spec_text: "k=hadamard/lloyd(b=4); v=uniform(b=4,axis=token)",
        source: "vLLM's turboquant_4bit_nc (vllm pull request 38479)",
        summary: "rotated keys at 16 Gaussian levels and their norms, 4 bit values per token",
        choose_when: "4 bits, no calibration, rotated",
    },
    Preset {
        name: "turbo-3",
        spec_text: "k=hadamard/lloyd(b=3); v=uniform(b=3,axis=token)",
        source: "vLLM's turboquant_3bit_nc (vllm pull request 38479)",
        summary: "rotated keys at 8 Gaussian levels and their norms, 3 bit values per token",
        choose_when: "3 bits, no calibration, rotated",
    },
    Preset {
        name: "oscar-2",
        spec_text: "k=qeig+hadamard/uniform(b=2,g=128,axis=token,clip=0.96); \
                    v=sveig+hadamard/uniform(b=2,g=128,axis=token,clip=0.92); \
                    sink=64; recent=256",
        source: "OSCAR (arXiv 2605.17757), 2 bit, groups of 128, clip .96 and .92",
        summary: "axes of queries and of scored values, rotated, clipped 2 bit per token",
        choose_when: "you compare with OSCAR",
    },
    Preset {
        name: "kvd-4",
        spec_text: "k=mean+qpca/grid(rate=4.2)/huffman; v=mean+gain+pca/grid(rate=3.4)/huffman; \
                    sink=32; recent=96",
        source: "kvd's own, docs/adr/0005-grid-codec.md",
        summary: "query-aware transform coding, about 4 bits per value, everything counted",
        choose_when: "the default once you can calibrate",
    },
    Preset {
        name: "kvd-3",
        spec_text: "k=mean+qpca/grid(rate=3.25)/huffman; v=mean+gain+pca/grid(rate=2.35)/huffman; \
                    sink=32; recent=96",
        source: "kvd's own, docs/adr/0005-grid-codec.md",
        summary: "query-aware transform coding, about 3 bits per value, everything counted",
        choose_when: "more is to be saved than by kvd-4",
    },
    Preset {
        name: "kvd-2",
        spec_text: "k=mean+qpca/grid(rate=2.35)/huffman; v=mean+gain+pca/grid(rate=1.75)/huffman; \
                    sink=32; recent=96",
        source: "kvd's own, docs/adr/0005-grid-codec.md",
        summary: "query-aware transform coding, about 2 bits per value, everything counted",
        choose_when: "memory is what you lack",
    },
    Preset {
        name: "kvd-1.5",
        spec_text: "k=mean+qpca/grid(rate=1.8)/huffman; v=mean+gain+pca/grid(rate=1.35)/huffman; \
                    sink=32; recent=96",
        source: "kvd's own, docs/adr/0005-grid-codec.md",
        summary: "query-aware transform coding, about 1.5 bits per value, everything counted",
        choose_when: "many tokens, some loss",
    },
    Preset {
        name: "kvd-1",
        spec_text: "k=mean+qpca/grid(rate=1.28)/huffman; v=mean+gain+pca/grid(rate=0.88)/huffman; \
                    sink=32; recent=96",
        source: "kvd's own, docs/adr/0005-grid-codec.md",
        summary: "query-aware transform coding, about 1 bit per value, everything counted",
        choose_when: "the most tokens, more loss",
    },
    Preset {
        name: "kvd-2-fast",
        spec_text: "k=mean+qpca/bitalloc(b=2.3); v=mean+gain+pca/bitalloc(b=1.7); \
                    sink=32; recent=96",
        source: "kvd's own, docs/adr/0006-bit-allocation.md",
        summary: "query-aware transform coding at fixed widths, 2 bits per value, no entropy coder",
        choose_when: "2 bits without an entropy coder",
    },
];

/// Every preset, in the order of a list for people.
#[must_use]
pub fn presets() -> &'static [Preset] {
    &PRESETS
}

/// The codec of that name.
#[must_use]
pub fn find_preset(name: &str) -> Option<CodecSpec> {
    let preset = PRESETS.iter().find(|preset| preset.name == name)?;
    Some(preset.spec_text.parse().expect("a test parses every preset"))
}

/// The preset that a text begins with, comments aside, and whether the text says no more.
#[must_use]
pub fn named_preset(text: &str) -> Option<(&'static Preset, bool)> {
    let FirstWord { word, end, next, .. } = FirstWord::read_word(text);
    let preset = PRESETS.iter().find(|preset| preset.name == word)?;
    let alone = match next {
        None => true,
        Some(';') => parse::is_blank(text, end + 1),
        Some(_) => false,
    };
    Some((preset, alone))
}

/// A preset's name, one with items that take the place of its own (`kvd-2; k.bound=0.3`), or a
/// spec text.
///
/// # Errors
/// When the text is none of these; of an unknown name the known one that is most like it is named.
pub fn resolve_spec(text: &str) -> Result<CodecSpec, SpecError> {
    let FirstWord { word, position, end, after, next } = FirstWord::read_word(text);
    if let Some(spec) = find_preset(word) {
        return match next {
            None => Ok(spec),
            Some(';') => parse::parse_over(spec, text, end + 1),
            Some(_) => {
                let message = format!("expected ';' or the end after the preset {word}");
                Err(SpecError { position: after, message })
            }
        };
    }
    // A spec's first word has its '=' or '[' behind it.
    if next.is_some_and(|next| word.is_empty() || next != ';') {
        return text.parse();
    }
    let message = match (word, find_similar_name(word)) {
        ("", _) => {
            "no codec: expected a preset such as kivi-4 or a spec such as k=fp8; v=fp8".into()
        }
        (_, Some(meant)) => {
            format!("{word:?} is not a preset or a spec such as k=fp8; v=fp8; is {meant} meant?")
        }
        _ => format!("{word:?} is not a preset such as kivi-4 or a spec such as k=fp8; v=fp8"),
    };
    Err(SpecError { position, message })
}

/// The preset's name that is most like `word`, if one is like it.
fn find_similar_name(word: &str) -> Option<&'static str> {
    const ALIKE: f64 = 0.85;
    let word = word.to_ascii_lowercase();
    let like = |entry: &Preset| strsim::jaro_winkler(entry.name, &word);
    // Of several that are as like the last counts, which is the first in the list for people.
    let alike = PRESETS.iter().rev().map(|entry| (like(entry), entry.name));
    let (like, name) = alike.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (like >= ALIKE).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_parses_and_round_trips() {
        for entry in presets() {
            let spec = find_preset(entry.name).unwrap();
            assert_eq!(spec.to_string(), entry.spec_text, "{}", entry.name);
            assert_eq!(resolve_spec(entry.name), Ok(spec.clone()));
            assert_eq!(resolve_spec(entry.spec_text), Ok(spec));
        }
        assert!(resolve_spec("vecinfer").unwrap_err().message.contains("vecinfer-4"));
    }

    #[test]
    fn comments_stand_before_between_and_after_all_tokens() {
        let plain = resolve_spec("kivi-4; recent=64").unwrap();
        for text in [
            "# for production\nkivi-4; recent=64\n",
            "# for production\r\nkivi-4; recent=64\r\n",
            "#\rkivi-4\r;recent=64\r",
            "\u{feff}kivi-4; recent=64",
            "\u{feff}# a mark\nkivi-4; recent=64",
            "\n\n  \t# 1\n# 2; with = signs, kvd-2\n\nkivi-4 # 3\n;# 4\nrecent # 5\n= # 6\n\
             64#",
            "kivi-4;recent=64; # the end",
            "kivi-4;recent=64;\n#\n",
            "# k=raw; v=raw\nkivi-4 # ; recent=1\n; recent=64",
        ] {
            assert_eq!(resolve_spec(text), Ok(plain.clone()), "{text:?}");
        }
        assert_eq!(resolve_spec("# alone\nkvd-2 # alone"), Ok(find_preset("kvd-2").unwrap()));
        let named = |text| named_preset(text).map(|(preset, alone)| (preset.name, alone));
        assert_eq!(named("# alone\nkvd-2 ; # alone"), Some(("kvd-2", true)));
        assert_eq!(named("\u{feff}kvd-2; sink=3"), Some(("kvd-2", false)));
        assert_eq!(named("k=raw; v=raw"), None);
        assert_eq!(resolve_spec("kvd-2;"), Ok(find_preset("kvd-2").unwrap()));
        let spec = resolve_spec("k=fp8; v=uniform(b=4,axis=token); sink=2").unwrap();
        for text in [
            "\u{feff}# a\r\nk # keys\r\n=fp8;v=uniform( # b\nb=4, # bits\naxis=token # c\n);\
             sink=2",
            "#\n#\nk=fp8;\n\n#v=raw\nv=uniform(b=4,axis=token);sink=2 #",
        ] {
            assert_eq!(resolve_spec(text), Ok(spec.clone()), "{text:?}");
        }
    }

    #[test]
    fn an_unknown_name_is_told_the_one_like_it_in_a_short_line() {
        for (word, meant) in [
            ("kivi4", "kivi-4"),
            ("KIVI", "kivi-4"),
            ("kvd", "kvd-4"),
            ("fp-8", "fp8"),
            ("vecinfer", "vecinfer-4"),
            ("turbo3", "turbo-3"),
        ] {
            let error = resolve_spec(word).unwrap_err().to_string();
            assert!(error.ends_with(&format!("is {meant} meant?")), "{word}: {error}");
            assert!(error.len() < 100 && !error.contains("character"), "{error}");
        }
        for word in ["wrong", "int4", "x"] {
            let error = resolve_spec(word).unwrap_err().to_string();
            assert!(!error.contains("meant") && error.len() < 100, "{error}");
        }
    }

    #[test]
    fn what_is_no_codec_is_refused_where_it_stands() {
        for (text, position, part) in [
            ("", 0, "no codec"),
            (" \r\n", 3, "no codec"),
            ("# kivi-4", 8, "no codec"),
            ("\u{feff}", 0, "no codec"),
            (";", 0, "expected"),
            ("# a\nzip", 4, "\"zip\" is not a preset"),
            ("\u{feff}zip; recent=3", 0, "is not a preset"),
            ("# a\nkivi-4 recent=64", 11, "after the preset kivi-4"),
            ("kivi-4 kvd-2", 7, "after the preset kivi-4"),
            ("# a\nkivi-4; recent=x", 19, "is not a number"),
            ("\u{feff}kivi-4; recent=x", 15, "is not a number"),
            ("kivi-4; ; recent=1", 8, "expected"),
            ("kivi-4 = 3", 7, "after the preset"),
            ("k=raw # ; v=raw", 15, "v= is missing"),
        ] {
            let error = resolve_spec(text).unwrap_err();
            assert!(error.message.contains(part), "{text:?}: {error}");
            assert_eq!(error.position, position, "{text:?}: {error}");
        }
    }
}
