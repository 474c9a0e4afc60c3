//! Streams against their own encoder, and on bytes that none wrote.

use super::decode::{StreamLayout, split_chunks};
use super::encode::ChunkEncoder;
use super::whole::WholeChunk;
use super::*;
use crate::simd::{dispatch_simd, each_width};
use proptest::prelude::*;

/// A table for `grouping` whose middle symbols are likely, the more so the larger `skew`.
fn table(grouping: SymbolGrouping, skew: f64) -> StreamTable {
    let middle = (grouping.symbol_count() / 2) as f64;
    let count = |symbol| (1e6 * skew.powf(-f64::abs(symbol as f64 - middle))) as u64;
    let counts: Vec<u64> = (0..grouping.symbol_count()).map(count).collect();
    StreamTable::new(HuffmanTable::new(&counts), grouping)
}

fn grouping(group: usize, levels: u16, raw_bits: u32) -> SymbolGrouping {
    SymbolGrouping { group, levels, raw_bits, missing: levels / 2 }
}

fn tables(skew: f64) -> Vec<StreamTable> {
    let groupings = [
        grouping(1, 2, 0),
        grouping(4, 3, 0),
        grouping(2, 7, 0),
        grouping(1, 31, 3),
        grouping(1, 128, 0),
        grouping(1, 256, 0),
        grouping(1, 2000, 0),
    ];
    groupings.into_iter().map(|grouping| table(grouping, skew)).collect()
}

/// Runs of those tables and lengths, with a gap after each.
fn runs(parts: &[(usize, usize)]) -> (Vec<StreamRun>, usize) {
    let mut next = 0;
    let runs = parts.iter().map(|&(table, len)| {
        let first = next;
        next += len + 1;
        StreamRun { table, first, len }
    });
    (runs.collect(), next)
}

/// Rows of codes that the tables have; the gaps are 7777.
fn rows(runs: &[StreamRun], per_row: usize, tables: &[StreamTable], picks: &[u32]) -> Vec<u16> {
    let mut rows = vec![7777; picks.len() / per_row * per_row];
    for (row, picks) in rows.chunks_exact_mut(per_row).zip(picks.chunks_exact(per_row)) {
        for run in runs {
            let grouping = tables[run.table].grouping;
            let span = u32::from(grouping.levels) << grouping.raw_bits;
            let at = run.first..run.first + run.len;
            // The middle half of the span, mostly.
            let code = |pick: &u32| (span / 4 + pick % span.div_ceil(2) + pick / 97 % 2) % span;
            row[at.clone()].iter_mut().zip(&picks[at]).for_each(|(c, p)| *c = code(p) as u16);
        }
    }
    rows
}

fn encoded(side: Side, runs: &[StreamRun], tables: &[StreamTable], rows: CodeRows<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let words = encode_chunk(
        side,
        CodeTables { runs, tables },
        rows,
        &mut bytes,
        &mut |_, _| unreachable!(),
    );
    assert_eq!(bytes.len(), 2 * words);
    let mut page = (words as u16).to_le_bytes().to_vec();
    page.extend(bytes);
    page
}

fn sides() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::Key), Just(Side::Value)]
}

proptest! {
    #[test]
    fn chunks_come_back_and_shorter_ones_do_not(
        side in sides(),
        parts in proptest::collection::vec((0usize..7, 1usize..12), 1..5),
        tokens in 1usize..=CHUNK_TOKENS,
        picks in proptest::collection::vec(any::<u32>(), 64 * 52),
        skew in 1f64..3.0,
    ) {
        let tables = tables(skew);
        let (runs, per_row) = runs(&parts);
        let rows = rows(&runs, per_row, &tables, &picks[..tokens * per_row]);
        let page = encoded(side, &runs, &tables, CodeRows { rows: &rows, per_row });
        let layout =
            StreamLayout { side, tokens, per_row, runs: &runs, tables: &tables, outliers: false };
        let codes = split_chunks(layout, &page).unwrap();
        let mut back = vec![7777; rows.len()];
        codes.decode_chunk(0, &mut back).unwrap();
        prop_assert_eq!(back, rows);
        prop_assert!(split_chunks(layout, &page[..page.len() - 1]).is_err());
        let longer = [&page[..], &[1; 2 * 4096]].concat();
        prop_assert!(split_chunks(layout, &longer).is_err());
    }

    #[test]
    fn any_bytes_give_codes_that_tables_have_or_an_error(
        side in sides(),
        parts in proptest::collection::vec((0usize..7, 1usize..12), 1..5),
        tokens in 1usize..=CHUNK_TOKENS,
        words in proptest::collection::vec(any::<u16>(), 0..600),
        skew in 1f64..3.0,
    ) {
        let tables = tables(skew);
        let (runs, per_row) = runs(&parts);
        let mut page = (words.len() as u16).to_le_bytes().to_vec();
        page.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        let layout =
            StreamLayout { side, tokens, per_row, runs: &runs, tables: &tables, outliers: false };
        let codes = split_chunks(layout, &page).unwrap();
        let mut rows = vec![7777; tokens * per_row];
        if codes.decode_chunk(0, &mut rows).is_err() {
            return Ok(());
        }
        for run in &runs {
            let grouping = tables[run.table].grouping;
            for row in rows.chunks_exact(per_row) {
                let codes = &row[run.first..run.first + run.len];
                prop_assert!(codes.iter().all(|c| c >> grouping.raw_bits < grouping.levels));
                prop_assert_eq!(row[run.first + run.len], 7777);
            }
        }
    }
}

proptest! {
    #[test]
    fn stream_after_stream_gives_the_words_of_step_after_step(
        side in sides(),
        (levels, skew) in (prop_oneof![2u16..33, 33u16..70, 100u16..300], 1f64..3.0),
        (quads, blocks) in (prop_oneof![1usize..=4, 5usize..=20], 1usize..=4),
        picks in proptest::collection::vec(any::<u32>(), 64 * 81),
    ) {
        let tables = [table(grouping(1, levels, 0), skew)];
        let (runs, per_row) = runs(&[(0, quads * QUAD)]);
        let tokens = if side == Side::Key { blocks * STREAMS } else { CHUNK_TOKENS };
        let rows = rows(&runs, per_row, &tables, &picks[..tokens * per_row]);
        let whole = WholeChunk { side, rows: &rows, per_row };
        prop_assert!(whole.is_whole(&runs, &tables));
        let in_registers = in_registers(whole, &runs[0], &tables[0]);
        let (runs, tables) = (&runs[..], &tables[..]);
        let plain = each_width(|| {
            let (mut out, rest) = (vec![1, 2, 3], &mut |_, _| unreachable!());
            let out_rows = &mut out;
            let chunk =
                ChunkEncoder { side, runs, tables, rows: &rows, per_row, out: out_rows, rest };
            (dispatch_simd(chunk), out)
        });
        let by_stream = each_width(|| {
            let mut out = vec![1, 2, 3];
            (whole.stream_by_stream(RunTable { run: &runs[0], table: &tables[0] }, &mut out), out)
        });
        prop_assert_eq!(&by_stream, &plain);
        prop_assert!(in_registers.is_none_or(|words| words == plain));
        let (mut out, rest) = (vec![1, 2, 3], &mut |_, _| unreachable!());
        let (codes, tables) = (CodeRows { rows: &rows, per_row }, CodeTables { runs, tables });
        let count = encode_chunk(side, tables, codes, &mut out, rest);
        prop_assert_eq!((count, out), plain);
    }
}

/// By registers of 512 bits, which every machine that has them must take where codes fit.
fn in_registers(
    whole: WholeChunk<'_>,
    run: &StreamRun,
    table: &StreamTable,
) -> Option<(usize, Vec<u8>)> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut out = vec![1, 2, 3];
        let registers = avx512::Avx512Encoder::new(whole, RunTable { run, table }, &mut out);
        let has = pulp::x86::V4::try_new().is_some();
        let fits = table.units.len() <= 32 && table.batch_size().0 > 1;
        assert_eq!(registers.is_some(), has && fits, "{table:?}");
        let count = registers?.append_words();
        Some((count, out))
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (whole, run, table);
        None
    }
}

#[test]
fn tables_of_few_codes_fit_into_registers() {
    for (levels, top_ups) in [(2, 1), (16, 1), (31, 2), (32, 2)] {
        let table = table(grouping(1, levels, 0), 1.0);
        assert_eq!((table.units.len(), QUAD / table.batch_size().0), (levels.into(), top_ups));
    }
}

/// A table of a grouping that leaves out every symbol with a bit of `absent`.
fn partial(grouping: SymbolGrouping, absent: u64) -> StreamTable {
    let counts: Vec<u64> = (1..=grouping.symbol_count() as u64).collect();
    let kept = |symbol: usize| symbol < 2 || absent >> (symbol % 64) & 1 == 0;
    let kept: Vec<bool> = (0..counts.len()).map(kept).collect();
    StreamTable::new(HuffmanTable::for_kept_symbols(&counts, &kept), grouping)
}

proptest! {
    #[test]
    fn codes_without_a_symbol_come_back_with_their_rests(
        side in sides(),
        parts in proptest::collection::vec((0usize..4, 1usize..12), 1..5),
        tokens in 1usize..=CHUNK_TOKENS,
        picks in proptest::collection::vec(any::<u32>(), 64 * 52),
        absent in any::<u64>(),
    ) {
        let groupings =
            [grouping(4, 3, 0), grouping(2, 15, 0), grouping(1, 31, 0), grouping(1, 31, 3)];
        let tables = groupings.map(|grouping| partial(grouping, absent));
        let (runs, per_row) = runs(&parts);
        let rows = rows(&runs, per_row, &tables, &picks[..tokens * per_row]);
        let (mut bytes, mut rests) = (Vec::new(), vec![0; rows.len()]);
        let mut rest = |place: usize, missing: i32| rests[place] += missing;
        let by = CodeTables { runs: &runs, tables: &tables };
        let codes = CodeRows { rows: &rows, per_row };
        let words = encode_chunk(side, by, codes, &mut bytes, &mut rest) as u16;
        let page = [&words.to_le_bytes()[..], &bytes].concat();
        let layout =
            StreamLayout { side, tokens, per_row, runs: &runs, tables: &tables, outliers: false };
        let mut back = vec![7777; rows.len()];
        split_chunks(layout, &page).unwrap().decode_chunk(0, &mut back).unwrap();
        let back: Vec<i32> = back.iter().zip(&rests).map(|(c, r)| i32::from(*c) + r).collect();
        prop_assert_eq!(back, rows.iter().map(|c| i32::from(*c)).collect::<Vec<_>>());
        prop_assert!(absent > 0 || rests.iter().all(|rest| *rest == 0));
    }
}

#[test]
fn entries_are_what_symbols_say() {
    for table in tables(1.5) {
        let Some(bytes) = table.byte_tables() else {
            assert!(table.grouping.symbol_count() > 128);
            continue;
        };
        for index in 0..256u32 {
            let (symbol, length) = table.huffman.decode_first(index);
            let codes = table.grouping.symbol_codes(symbol);
            let width = 8 / table.codes_per_symbol() as u32;
            for (at, code) in codes[..table.codes_per_symbol()].iter().enumerate() {
                let entry = u32::from(bytes.codes[index as usize]) >> (width * at as u32);
                assert_eq!(entry & ((1 << width) - 1), u32::from(*code));
            }
            assert_eq!(u32::from(bytes.lengths[index as usize]), length);
        }
    }
}

#[test]
fn a_batch_never_takes_more_than_a_word() {
    for table in tables(1.0).iter().chain(&tables(2.5)) {
        let (batch, need) = table.batch_size();
        assert!(need <= WORD_BITS && batch * table.codes_per_symbol() <= QUAD, "{table:?}");
    }
}
