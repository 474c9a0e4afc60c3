//! Tables in plain text that fit a terminal.

/// Columns of a terminal that every table fits unless --wide asks for more.
pub(super) const COLUMNS: usize = 100;

/// A column: its name, its cells, and to which side they lie.
pub(super) struct TableColumn {
    name: &'static str,
    cells: Vec<String>,
    left: bool,
}

impl TableColumn {
    /// Text, which lies to the left.
    pub(super) fn of_text(name: &'static str, cells: impl IntoIterator<Item = String>) -> Self {
        Self { name, cells: cells.into_iter().collect(), left: true }
    }

    /// Numbers, which lie to the right.
    pub(super) fn of_numbers(name: &'static str, cells: impl IntoIterator<Item = String>) -> Self {
        Self { name, cells: cells.into_iter().collect(), left: false }
    }

    fn column_width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.fold(self.name.chars().count(), usize::max)
    }
}

/// Lines of the columns, a head first; every column has as many cells.
pub(super) fn render_table(columns: &[TableColumn]) -> String {
    let rows = columns.iter().map(|column| column.cells.len()).max().unwrap_or(0);
    let widths: Vec<usize> = columns.iter().map(TableColumn::column_width).collect();
    let mut text = String::new();
    for row in 0..=rows {
        let mut line = String::new();
        for (column, &width) in columns.iter().zip(&widths) {
            let cell = match row {
                0 => column.name,
                row => column.cells.get(row - 1).map_or("", String::as_str),
            };
            let gap = if line.is_empty() { "" } else { "  " };
            line.push_str(gap);
            line.push_str(&if column.left {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            });
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Codecs as cells of a column: a name or spec that fits, else a number with its legend.
pub(super) struct CodecLabels {
    /// One of each codec.
    pub(super) cells: Vec<String>,
    /// Lines that say what numbers stand for; empty where all fit.
    pub(super) legend: String,
}

impl CodecLabels {
    /// Labels of at most `width` columns.
    pub(super) fn new(codecs: impl IntoIterator<Item = String>, width: usize) -> Self {
        let (mut cells, mut long, mut legend) = (Vec::new(), Vec::new(), String::new());
        for codec in codecs {
            if codec.chars().count() <= width {
                cells.push(codec);
                continue;
            }
            let known = long.iter().position(|other| *other == codec);
            let number = known.unwrap_or(long.len()) + 1;
            cells.push(format!("codec {number}"));
            if known.is_none() {
                legend.push_str(&wrap_text(&format!("codec {number} is {codec}"), "  "));
                long.push(codec);
            }
        }
        Self { cells, legend }
    }
}

/// Lines of at most [`COLUMNS`], broken between words; those after the first begin with `indent`.
pub(super) fn wrap_text(text: &str, indent: &str) -> String {
    wrap_after(String::new(), text, indent)
}

/// Lines that all begin with `indent`.
pub(super) fn wrap_indented(text: &str, indent: &str) -> String {
    wrap_after(indent.to_owned(), text, indent)
}

/// Adds words to `lines`, of which one is begun, and begins the further ones with `indent`.
fn wrap_after(mut lines: String, text: &str, indent: &str) -> String {
    let (mut length, mut is_begun) = (lines.len(), false);
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if is_begun && length + 1 + width > COLUMNS {
            lines.push('\n');
            lines.push_str(indent);
            length = indent.len();
        } else if is_begun {
            lines.push(' ');
            length += 1;
        }
        is_begun = true;
        lines.push_str(word);
        length += width;
    }
    lines + "\n"
}

/// Columns of the longest line.
#[cfg(test)]
pub(super) fn columns_of(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_end_without_spaces() {
        let names = TableColumn::of_text("codec", ["raw", "kivi-4"].map(str::to_owned));
        let bits = TableColumn::of_numbers("bits", ["16.00", "4"].map(str::to_owned));
        let note = TableColumn::of_text("note", ["", "x"].map(str::to_owned));
        let lines = "codec    bits  note\nraw     16.00\nkivi-4      4  x\n";
        assert_eq!(render_table(&[names, bits, note]), lines);
    }

    #[test]
    fn a_codec_too_long_for_its_column_has_a_number_that_is_explained() {
        let long = "k=mean+qpca/grid(rate=2.35)/huffman; ".repeat(4);
        let codecs = ["raw".to_owned(), long.clone(), "fp8".to_owned(), long];
        let CodecLabels { cells, legend } = CodecLabels::new(codecs, 12);
        assert_eq!(cells, ["raw", "codec 1", "fp8", "codec 1"]);
        assert_eq!(legend.matches("codec 1 is k=mean").count(), 1);
        assert!(legend.lines().count() == 2 && columns_of(&legend) <= COLUMNS, "{legend}");
    }
}
