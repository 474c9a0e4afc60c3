//! Tables of `kvd bench`: what a terminal has columns for, and with --wide every figure.

use super::super::table::{CodecLabels, TableColumn, render_table, wrap_text};
#[cfg(feature = "eval")]
use kvd_bench::TransportRow;
use kvd_bench::{AttendRow, CodecRow, HuffmanRow, MeasuredFigure, ScoresRow, StoreRow};
use std::fmt::Write;

/// How the rows of a benchmark are printed.
pub(super) struct BenchSheet<T> {
    /// Columns beside the codec's label, of which each has so many at most.
    narrow: fn(&[T], Vec<String>) -> Vec<TableColumn>,
    /// The codec that a label stands for, and the columns that a label may have.
    codec: (fn(&T) -> String, usize),
    /// Explains the figures, below the table.
    note: &'static str,
    /// All figures.
    pub(super) wide: fn(&[T]) -> String,
}

impl<T> BenchSheet<T> {
    /// The table that fits a terminal.
    pub(super) fn narrow_text(&self, rows: &[T]) -> String {
        let (codec, width) = self.codec;
        let CodecLabels { cells, legend } = CodecLabels::new(rows.iter().map(codec), width);
        let text = render_table(&(self.narrow)(rows, cells));
        format!("{text}\n{}{legend}", wrap_text(self.note, ""))
    }
}

/// A figure in at most five characters where it is below 100,000.
fn short_figure(figure: f64) -> String {
    match figure.abs() {
        size if size < 9.995 => format!("{figure:.2}"),
        size if size < 99.95 => format!("{figure:.1}"),
        _ => format!("{figure:.0}"),
    }
}

fn median_text(figure: MeasuredFigure) -> String {
    short_figure(figure.median)
}

/// `best..upper quartile`.
fn spread_text(figure: MeasuredFigure) -> String {
    format!("{}..{}", short_figure(figure.best), short_figure(figure.upper_quartile))
}

fn column_cells<T>(rows: &[T], cell: impl Fn(&T) -> String) -> Vec<String> {
    rows.iter().map(cell).collect()
}

pub(super) const ATTEND: BenchSheet<AttendRow> = BenchSheet {
    narrow: |rows, labels| {
        vec![
            TableColumn::of_text("codec", labels),
            TableColumn::of_numbers("cpu ns", column_cells(rows, |row| median_text(row.cpu_ns))),
            TableColumn::of_numbers("best..q3", column_cells(rows, |row| spread_text(row.cpu_ns))),
            TableColumn::of_numbers("wall ns", column_cells(rows, |row| median_text(row.wall_ns))),
            TableColumn::of_text("set", column_cells(rows, |row| row.instruction_set.to_owned())),
            TableColumn::of_text("rounds to", column_cells(rows, |row| row.precision.to_owned())),
            TableColumn::of_numbers("threads", column_cells(rows, |row| row.threads.to_string())),
            TableColumn::of_numbers("context", column_cells(rows, |row| row.context.to_string())),
            TableColumn::of_numbers(
                "bits",
                column_cells(rows, |row| format!("{:.2}", row.bits_per_value)),
            ),
            TableColumn::of_numbers(
                "error",
                column_cells(rows, |row| format!("{:.0e}", row.kernel_error)),
            ),
        ]
    },
    codec: (|row| row.codec.clone(), 14),
    note: "ns per token and KV head: K and V, all query heads of the group; median, best and upper \
           quartile. error: of the kernel alone, relative. --wide: GB/s, products, share of peaks.",
    wide: attend_wide,
};

pub(super) const SCORES: BenchSheet<ScoresRow> = BenchSheet {
    narrow: |rows, labels| {
        vec![
            TableColumn::of_text("codec", labels),
            TableColumn::of_numbers("cpu ns", column_cells(rows, |row| median_text(row.cpu_ns))),
            TableColumn::of_numbers("best..q3", column_cells(rows, |row| spread_text(row.cpu_ns))),
            TableColumn::of_text("set", column_cells(rows, |row| row.instruction_set.to_owned())),
            TableColumn::of_text("precision", column_cells(rows, |row| row.precision.to_owned())),
            TableColumn::of_numbers("context", column_cells(rows, |row| row.context.to_string())),
            TableColumn::of_numbers(
                "bits",
                column_cells(rows, |row| format!("{:.3}", row.bits_per_value)),
            ),
            TableColumn::of_numbers(
                "error",
                column_cells(rows, |row| format!("{:.1e}", row.kernel_error)),
            ),
        ]
    },
    codec: (|row| row.codec.clone(), 24),
    note: "ns per key: all query heads of the group, every score kept; median, best, upper \
           quartile.",
    wide: scores_wide,
};

pub(super) const CODEC: BenchSheet<CodecRow> = BenchSheet {
    narrow: |rows, labels| {
        let coded = |row: &CodecRow| {
            row.huffman.map_or_else(|| "-".to_owned(), |h| format!("{:.2}", h.bits_per_code))
        };
        vec![
            TableColumn::of_text("side", labels),
            TableColumn::of_text("set", column_cells(rows, |row| row.instruction_set.to_owned())),
            TableColumn::of_numbers(
                "encode ns",
                column_cells(rows, |row| median_text(row.encode_f16_ns)),
            ),
            TableColumn::of_numbers(
                "best..q3",
                column_cells(rows, |row| spread_text(row.encode_f16_ns)),
            ),
            TableColumn::of_numbers(
                "GB/s",
                column_cells(rows, |row| format!("{:.3}", row.encode_f16_gb_per_s)),
            ),
            TableColumn::of_numbers(
                "decode ns",
                column_cells(rows, |row| median_text(row.decode_ns)),
            ),
            TableColumn::of_numbers("coded", column_cells(rows, coded)),
            TableColumn::of_numbers(
                "bits",
                column_cells(rows, |row| format!("{:.2}", row.bits_per_value)),
            ),
        ]
    },
    codec: (|row| format!("{}={}", row.side, row.side_spec), 28),
    note: "ns per value on one thread, of f16 rows; GB/s count two bytes a value. decode: the \
           reference decoder. coded: bits of a Huffman code. --wide: f32 rows, Huffman coding and \
           entropy too.",
    wide: codec_wide,
};

pub(super) const STORE: BenchSheet<StoreRow> = BenchSheet {
    narrow: |rows, labels| {
        vec![
            TableColumn::of_text("codec", labels),
            TableColumn::of_numbers("us/token", column_cells(rows, |row| median_text(row.cpu_us))),
            TableColumn::of_numbers("best..q3", column_cells(rows, |row| spread_text(row.cpu_us))),
            TableColumn::of_numbers("first", column_cells(rows, |row| short_figure(row.first_us))),
            TableColumn::of_text("set", column_cells(rows, |row| row.instruction_set.to_owned())),
            TableColumn::of_numbers("threads", column_cells(rows, |row| row.threads.to_string())),
            TableColumn::of_text(
                "errors",
                column_cells(rows, |row| row.errors.measure_name().to_owned()),
            ),
            TableColumn::of_numbers(
                "bits",
                column_cells(rows, |row| format!("{:.3}", row.bits_per_value)),
            ),
            TableColumn::of_numbers(
                "f16 GB/s",
                column_cells(rows, |row| format!("{:.3}", row.logical_gb_per_s)),
            ),
        ]
    },
    codec: (|row| row.codec.clone(), 17),
    note: "us of processor time, K and V of one layer; the first call trains tables where there \
           are such. Errors are measured of one block in 256. GB/s of f16 input by processor \
           time; --wide: by wall time and of pages too.",
    wide: store_wide,
};

#[cfg(feature = "eval")]
pub(super) const TRANSPORT: BenchSheet<TransportRow> = BenchSheet {
    narrow: |rows, labels| {
        vec![
            TableColumn::of_text("transport", column_cells(rows, |row| row.transport.to_owned())),
            TableColumn::of_text("codec", labels),
            TableColumn::of_numbers("context", column_cells(rows, |row| row.context.to_string())),
            TableColumn::of_numbers(
                "queries",
                column_cells(rows, |row| row.query_tokens.to_string()),
            ),
            TableColumn::of_numbers("wall us", column_cells(rows, |row| median_text(row.wall_us))),
            TableColumn::of_numbers("best..q3", column_cells(rows, |row| spread_text(row.wall_us))),
            TableColumn::of_numbers("99 % us", column_cells(rows, |row| short_figure(row.slow_us))),
            TableColumn::of_numbers("cpu us", column_cells(rows, |row| median_text(row.cpu_us))),
            TableColumn::of_numbers(
                "stored/s",
                column_cells(rows, |row| short_figure(row.stored_tokens_per_s)),
            ),
            TableColumn::of_numbers("dev", column_cells(rows, |row| short_figure(row.device_us))),
        ]
    },
    codec: (|row| row.codec.clone(), 7),
    note: "us of one attend; cpu counts client, daemon and stores beside, dev the backend alone.",
    wide: transport_wide,
};

/// `median [best..upper quartile]`.
fn figure_text(figure: MeasuredFigure) -> String {
    let MeasuredFigure { median, best, upper_quartile } = figure;
    format!("{median:.2} [{best:.2}..{upper_quartile:.2}]")
}

fn attend_wide(rows: &[AttendRow]) -> String {
    let mut text = format!(
        "{:>24} {:>24} {:>9} {:>9} {:>7} {:>8} {:>8} {:>8} {:>8} {:>8} {:>12} {:>8} {:>8}  codec\n",
        "cpu ns [best..q3]",
        "wall ns [best..q3]",
        "set",
        "precision",
        "threads",
        "context",
        "bits",
        "GB/s",
        "f16 GB/s",
        "of read",
        "products",
        "of peak",
        "error"
    );
    for row in rows {
        writeln!(
            text,
            "{:>24} {:>24} {:>9} {:>9} {:>7} {:>8} {:>8.3} {:>8.2} {:>8.2} {:>7.0}% {:>12} {:>8} \
             {:>8.1e}  {}",
            figure_text(row.cpu_ns),
            figure_text(row.wall_ns),
            row.instruction_set,
            row.precision,
            row.threads,
            row.context,
            row.bits_per_value,
            row.stored_gb_per_s,
            row.logical_gb_per_s,
            100.0 * row.of_read_speed,
            row.products.join("+"),
            row.of_multiply_speed
                .map_or_else(|| "-".to_owned(), |of| format!("{:.0}%", 100.0 * of)),
            row.kernel_error,
            row.codec
        )
        .expect("write to a string");
    }
    text + "\nns per token and KV head: K and V, all query heads of the group; median, best and \
            upper quartile\nproducts of K and V, and multiplications as part of what one thread \
            makes of such products\n"
}

fn scores_wide(rows: &[ScoresRow]) -> String {
    let head = ["cpu ns [best..q3]", "set", "precision", "context", "bits", "error"];
    let mut text = format!(
        "{:>24} {:>9} {:>9} {:>8} {:>8} {:>8}  codec\n",
        head[0], head[1], head[2], head[3], head[4], head[5]
    );
    for row in rows {
        writeln!(
            text,
            "{:>24} {:>9} {:>9} {:>8} {:>8.3} {:>8.1e}  {}",
            figure_text(row.cpu_ns),
            row.instruction_set,
            row.precision,
            row.context,
            row.bits_per_value,
            row.kernel_error,
            row.codec
        )
        .expect("write to a string");
    }
    text + "\nns per key: all query heads of the group, every score kept\n"
}

fn codec_wide(rows: &[CodecRow]) -> String {
    let mut text = format!(
        "{:>22} {:>9} {:>9} {:>22} {:>9} {:>22} {:>22} {:>22} {:>11} {:>7} {:>7} {:>8}  side\n",
        "encode f32 [best..q3]",
        "set",
        "GB/s",
        "encode f16 [best..q3]",
        "GB/s",
        "decode [best..q3]",
        "codes in",
        "codes out",
        "codes/symb.",
        "entropy",
        "coded",
        "bits"
    );
    let codes = |ns: Option<MeasuredFigure>| ns.map_or_else(|| "-".to_owned(), figure_text);
    for row in rows {
        let huffman = row.huffman.map_or_else(
            || ["-", "-", "-"].map(str::to_owned),
            |HuffmanRow { codes_per_symbol, entropy, bits_per_code }| {
                [
                    codes_per_symbol.to_string(),
                    format!("{entropy:.3}"),
                    format!("{bits_per_code:.3}"),
                ]
            },
        );
        writeln!(
            text,
            "{:>22} {:>9} {:>9.3} {:>22} {:>9.3} {:>22} {:>22} {:>22} {:>11} {:>7} {:>7} {:>8.3}  \
             {}={}",
            figure_text(row.encode_ns),
            row.instruction_set,
            row.encode_gb_per_s,
            figure_text(row.encode_f16_ns),
            row.encode_f16_gb_per_s,
            figure_text(row.decode_ns),
            codes(row.coding_ns),
            codes(row.codes_ns),
            huffman[0],
            huffman[1],
            huffman[2],
            row.bits_per_value,
            row.side,
            row.side_spec
        )
        .expect("write to a string");
    }
    text + "\nns per value on one thread, of rows that are f32 already and of f16 rows, which are \
            widened first as in a store; GB/s count two bytes a value\ndecode is the reference \
            decoder, codes in those that are made words of alone, codes out those that attention's \
            Huffman decoder reads\nentropy of single codes, what their words take (coded), and all \
            that is stored, in bits\n"
}

fn store_wide(rows: &[StoreRow]) -> String {
    let mut text = format!(
        "{:>24} {:>14} {:>9} {:>7} {:>8} {:>8} {:>8} {:>8} {:>9}  codec\n",
        "cpu us/token [best..q3]",
        "first us/token",
        "set",
        "threads",
        "errors",
        "bits",
        "GB/s",
        "f16 GB/s",
        "wall GB/s"
    );
    for row in rows {
        writeln!(
            text,
            "{:>24} {:>14.2} {:>9} {:>7} {:>8} {:>8.3} {:>8.3} {:>8.3} {:>9.3}  {}",
            figure_text(row.cpu_us),
            row.first_us,
            row.instruction_set,
            row.threads,
            row.errors.measure_name(),
            row.bits_per_value,
            row.stored_gb_per_s,
            row.logical_gb_per_s,
            row.wall_gb_per_s,
            row.codec
        )
        .expect("write to a string");
    }
    text + "\nK and V of one layer; the first call trains tables where there are such\nGB/s of \
            pages and of f16 input by processor time, and of f16 input by wall time\n"
}

#[cfg(feature = "eval")]
fn transport_wide(rows: &[TransportRow]) -> String {
    let head = ["wall us [best..q3]", "99 % us", "cpu us [best..q3]", "device us"];
    let mut text = format!(
        "{:>24} {:>8} {:>24} {:>9} {:>8} {:>7}  {:<14} codec\n",
        head[0], head[1], head[2], head[3], "context", "queries", "transport"
    );
    for row in rows {
        writeln!(
            text,
            "{:>24} {:>8.0} {:>24} {:>9.1} {:>8} {:>7}  {:<14} {}",
            figure_text(row.wall_us),
            row.slow_us,
            figure_text(row.cpu_us),
            row.device_us,
            row.context,
            row.query_tokens,
            row.transport,
            row.codec
        )
        .expect("write to a string");
    }
    text + "\nus of one attend; cpu counts client, daemon and stores beside, device the backend\n"
}

#[cfg(test)]
mod tests {
    use super::super::super::table::{COLUMNS, columns_of};
    use super::*;

    /// As long as figures get: minutes a call, 16 million tokens, 1024 threads.
    fn figure(median: f64) -> MeasuredFigure {
        MeasuredFigure { median, best: median * 0.97, upper_quartile: median * 1.03 }
    }

    const CODECS: [&str; 3] = [
        "raw",
        "vecinfer-2-reg",
        "k=mean+qpca/grid(rate=2.35)/huffman; v=mean+gain+pca/grid(rate=1.75)/huffman; sink=32",
    ];
    const FIGURES: [f64; 5] = [0.01, 1.5, 99.97, 4711.3, 98_765.4];

    fn cases() -> impl Iterator<Item = (String, f64)> {
        CODECS.iter().flat_map(|codec| FIGURES.map(|figure| ((*codec).to_owned(), figure)))
    }

    fn fits<T>(sheet: &BenchSheet<T>, rows: Vec<T>) {
        let text = sheet.narrow_text(&rows);
        assert!(columns_of(&text) <= COLUMNS, "{} columns:\n{text}", columns_of(&text));
        assert!(rows.len() < text.lines().count(), "{text}");
        // The whole spec stands below.
        assert_eq!(text.matches("grid(rate=1.75)").count(), 1, "{text}");
        // With --wide each row has a line of its own, however long.
        assert!((sheet.wide)(&rows).lines().count() > rows.len());
    }

    #[test]
    fn attention_and_scores_fit_a_terminal() {
        let row = |(codec, ns): (String, f64)| AttendRow {
            codec,
            instruction_set: "avx-vnni",
            precision: "single",
            threads: 1024,
            context: 1 << 24,
            bits_per_value: 16.031,
            cpu_ns: figure(ns),
            wall_ns: figure(ns),
            stored_gb_per_s: ns,
            logical_gb_per_s: ns,
            of_read_speed: 1.234,
            products: ["words", "nibbles"],
            peak_per_ns: [None; 2],
            of_multiply_speed: None,
            kernel_error: 1.234e-5,
        };
        fits(&ATTEND, cases().map(row).collect());
        let row = |(codec, ns): (String, f64)| ScoresRow {
            codec,
            instruction_set: "portable",
            precision: "single",
            context: 1 << 24,
            bits_per_value: 16.031,
            cpu_ns: figure(ns),
            kernel_error: 1.234e-5,
        };
        fits(&SCORES, cases().map(row).collect());
    }

    #[test]
    fn encoding_and_storing_fit_a_terminal() {
        let row = |(side_spec, ns): (String, f64)| CodecRow {
            side_spec,
            side: "k",
            instruction_set: "portable",
            threads: 1,
            bits_per_value: 16.031,
            encode_ns: figure(ns),
            encode_gb_per_s: 12.345,
            encode_f16_ns: figure(ns),
            encode_f16_gb_per_s: 12.345,
            coding_ns: Some(figure(ns)),
            decode_ns: figure(ns),
            codes_ns: Some(figure(ns)),
            huffman: Some(HuffmanRow { codes_per_symbol: 2, entropy: 3.0, bits_per_code: 3.1 }),
        };
        fits(&CODEC, cases().map(row).collect());
        let row = |(codec, us): (String, f64)| StoreRow {
            codec,
            instruction_set: "portable",
            threads: 1024,
            errors: kvd_bench::ErrorMeasure::Queries,
            measured_blocks: 0.0625,
            bits_per_value: 16.031,
            cpu_us: figure(us),
            first_us: us,
            logical_gb_per_s: 12.345,
            stored_gb_per_s: 12.345,
            wall_gb_per_s: 12.345,
        };
        fits(&STORE, cases().map(row).collect());
    }

    #[cfg(feature = "eval")]
    #[test]
    fn transports_fit_a_terminal() {
        let row = |(codec, us): (String, f64)| TransportRow {
            transport: "unix stream",
            codec,
            context: 1 << 24,
            query_tokens: 1 << 16,
            wall_us: figure(us),
            slow_us: us,
            cpu_us: figure(us),
            stored_tokens_per_s: 1_234_567.0,
            device_us: 12_345.0,
        };
        fits(&TRANSPORT, cases().map(row).collect());
    }
}
