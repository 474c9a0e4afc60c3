//! The screen over a backend that is no terminal.

use super::super::models::ModelRow;
use super::sample::{SampledModel, WorkBytes};
use super::*;
use kvd_client::{ModelDescription, ModelStats, PoolStats, SequenceInfo, SessionInfo, StoredBytes};
use kvd_proto::v1;

fn stored(packed_values: u64, packed_bytes: u64, raw_values: u64) -> StoredBytes {
    let raw_bytes = raw_values * 2;
    StoredBytes { packed_values, packed_bytes, raw_values, raw_bytes, ..Default::default() }
}

/// The largest id that there may be.
const LARGEST_ID: u64 = u64::MAX - 1;

/// A sequence of Llama-3.1-8B under `kivi-4`: 65536 values a token, the last 128 tokens and the
/// page that those begin in as they came, pages of 64 tokens of 5.03 bits a value.
fn stored_tokens(tokens: u32) -> StoredBytes {
    let packed = u64::from(tokens.saturating_sub(128) / 64 * 64);
    stored(packed << 16, packed * 41_216, (u64::from(tokens) - packed) << 16)
}

/// The daemon's sequences hold all that its model and its pool do.
fn sum_stored(sequences: &[SequenceInfo]) -> StoredBytes {
    sequences.iter().filter_map(|of| of.stored).fold(stored(0, 0, 0), |sum, of| StoredBytes {
        packed_values: sum.packed_values + of.packed_values,
        packed_bytes: sum.packed_bytes + of.packed_bytes,
        raw_values: sum.raw_values + of.raw_values,
        raw_bytes: sum.raw_bytes + of.raw_bytes,
        ..sum
    })
}

fn model(id: u64, name: &str, codec: &str, of: &[SequenceInfo]) -> SampledModel {
    let stats = ModelStats {
        model_id: id,
        name: name.to_owned(),
        codec: codec.to_owned(),
        sequences: of.len() as u64,
        stored: Some(sum_stored(of)),
        ..Default::default()
    };
    let dtype = v1::DType::DtypeF16.into();
    let geometry = Some(v1::Geometry { dtype, ..Default::default() });
    let described = ModelDescription { model: Some(stats), geometry, ..Default::default() };
    let row = ModelRow::of_description(&described).unwrap();
    let error = if of.is_empty() { [0.0; 2] } else { [0.079; 2] };
    SampledModel { row, counts: WorkBytes::default(), error }
}

fn sequence(id: u64, session_id: u64, tokens: u32, idle_s: u64) -> SequenceInfo {
    SequenceInfo {
        sequence_id: id,
        model_id: 7,
        session_id,
        length: tokens,
        age_ms: 3_600_000 + idle_s * 1000,
        idle_ms: idle_s * 1000,
        stored: Some(stored_tokens(tokens)),
        ..Default::default()
    }
}

fn sample(at: Instant, stored: u64) -> DaemonSample {
    let sequences = vec![
        sequence(1_311_768_464_867_721_223, 5, 2048, 3),
        sequence(1_311_768_464_867_721_224, 0, 612, 1560),
        sequence(LARGEST_ID, 6, 32_768, 42),
    ];
    let held = sum_stored(&sequences);
    let pool = PoolStats {
        tier: "host".to_owned(),
        device: "0".to_owned(),
        capacity_bytes: 2 << 30,
        used_bytes: held.packed_bytes + held.raw_bytes,
        ..Default::default()
    };
    let name = "meta-llama/Llama-3.1-8B-Instruct";
    let mut used = model(7, name, "kivi-4", &sequences);
    used.counts = WorkBytes { stored, encoded: stored, attended: stored * 64, loaded: 0 };
    DaemonSample {
        at,
        version: "0.1.0".to_owned(),
        device: "cpu (avx2, 2 threads)".to_owned(),
        serving: true,
        pools: vec![pool],
        models: vec![used, model(8, "tiny", "kvd-2", &[])],
        sessions: vec![SessionInfo {
            session_id: 5,
            name: "engine-0".to_owned(),
            ..Default::default()
        }],
        sequences,
        has_more: false,
    }
}

fn screen() -> TopScreen {
    let mut screen = TopScreen::new("team-a".to_owned());
    let began = Instant::now();
    screen.add_sample(sample(began, 0));
    screen.add_sample(sample(began + Duration::from_secs(2), 64 << 20));
    screen
}

#[test]
fn the_screen_fits_80_columns_and_is_the_one_of_the_manual() {
    let text = draw_text(&mut screen(), [80, 13]).unwrap();
    for part in ["store 32.0 MiB/s", "attend 2.0 GiB/s", "5.03", "engine-0", "gone", "26 min"] {
        assert!(text.contains(part), "no {part} in\n{text}");
    }
    assert_eq!(include_str!("../../../../../docs/kvd-top.txt"), text, "docs/kvd-top.txt");
}

#[test]
fn sequences_are_sorted_by_what_a_key_says() {
    let mut screen = screen();
    let mut first = |key| {
        press_key(&mut screen, KeyCode::Char(key));
        let text = draw_text(&mut screen, [80, 20]).unwrap();
        let row = text.lines().skip_while(|line| !line.starts_with("sequence")).nth(1).unwrap();
        row.split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!(first('i'), "1311768464867721224");
    assert_eq!(first('h'), LARGEST_ID.to_string());
    assert_eq!(first('t'), LARGEST_ID.to_string());
    assert_eq!(first('a'), "1311768464867721224");
    // Once round: idle again.
    assert_eq!(first('s'), "1311768464867721224");
}

#[test]
fn a_sequence_is_closed_by_two_keys_and_by_no_one_of_them() {
    let mut screen = screen();
    let closes = |screen: &mut TopScreen, key| match press_key(screen, key) {
        KeyWish::Close(sequence) => Some(sequence.0),
        KeyWish::Stay | KeyWish::Leave => None,
    };
    assert_eq!(closes(&mut screen, KeyCode::Char('y')), None);
    assert_eq!(closes(&mut screen, KeyCode::Char('c')), None);
    assert!(draw_text(&mut screen, [80, 20]).unwrap().contains("select a sequence first"));
    press_key(&mut screen, KeyCode::Down);
    assert_eq!(closes(&mut screen, KeyCode::Char('c')), None);
    assert!(draw_text(&mut screen, [80, 20]).unwrap().contains("close sequence 131"));
    // Any other key takes it back.
    press_key(&mut screen, KeyCode::Char('n'));
    assert_eq!(closes(&mut screen, KeyCode::Char('y')), None);
    press_key(&mut screen, KeyCode::Char('c'));
    // Leaving is no answer either.
    assert!(matches!(press_key(&mut screen, KeyCode::Esc), KeyWish::Stay));
    press_key(&mut screen, KeyCode::Char('c'));
    assert_eq!(closes(&mut screen, KeyCode::Char('y')), Some(1_311_768_464_867_721_224));
    assert!(matches!(press_key(&mut screen, KeyCode::Char('q')), KeyWish::Leave));
}

#[test]
fn small_and_large_terminals_are_drawn_too() {
    for size in [[20, 5], [80, 24], [200, 60]] {
        let text = draw_text(&mut screen(), size).unwrap();
        assert_eq!(text.lines().count(), usize::from(size[1]), "{size:?}: {text}");
        assert!(text.contains("q leave"), "{size:?}: {text}");
    }
    let mut empty = TopScreen::new("default".to_owned());
    let mut nothing = sample(Instant::now(), 0);
    (nothing.models, nothing.sequences, nothing.sessions) = Default::default();
    empty.add_sample(nothing);
    assert!(draw_text(&mut empty, [80, 24]).unwrap().contains("ratio -"));
}
