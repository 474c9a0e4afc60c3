//! A table in plain text: the first column to the left, the others to the right.

use std::ops::Range;

/// Lays out `rows` under `header`; every row has as many cells as the header.
pub(crate) fn format_table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize, name: &str| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).fold(name.chars().count(), usize::max)
    };
    let widths: Vec<usize> = header.iter().enumerate().map(|(i, name)| width(i, name)).collect();
    let line = |cells: &[&str]| {
        let mut text = String::from(" ");
        for (i, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            let cell =
                if i == 0 { format!(" {cell:<width$}") } else { format!("  {cell:>width$}") };
            text.push_str(&cell);
        }
        text.trim_end().to_owned() + "\n"
    };
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    let mut text = line(header);
    text.push_str(&line(&rule.iter().map(String::as_str).collect::<Vec<_>>()));
    for row in rows {
        text.push_str(&line(&row.iter().map(String::as_str).collect::<Vec<_>>()));
    }
    text
}

/// Columns that a terminal has.
pub(crate) const COLUMNS: usize = 100;

/// Narrowest column that a text is broken for.
const TEXT_MIN: usize = 16;

/// Like [`format_table`], in lines of at most `width` columns: texts are broken between words, and
/// a table of too many columns is continued below, under its first column.
pub(crate) fn format_fitted(header: &[&str], rows: &[Vec<String>], width: usize) -> String {
    let plain = format_table(header, rows);
    if longest_line(&plain) <= width {
        return plain;
    }
    let is_text = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.into_iter().any(|cell| cell.chars().count() > TEXT_MIN && cell.contains(' '))
    };
    if (1..header.len()).any(is_text) || header.len() < 3 {
        return format_broken(header, rows, width);
    }
    let mut blocks = Vec::new();
    let mut from = 1;
    while from < header.len() {
        // As many columns as fit; one at least, so that there is an end.
        let fits = |to: &usize| longest_line(&table_part(header, rows, from..*to)) <= width;
        let to = (from + 1..=header.len()).rev().find(fits).unwrap_or(from + 1);
        blocks.push(table_part(header, rows, from..to));
        from = to;
    }
    let continued = blocks.join("\n");
    if longest_line(&continued) > width { format_broken(header, rows, width) } else { continued }
}

/// The first column and some others.
fn table_part(header: &[&str], rows: &[Vec<String>], columns: Range<usize>) -> String {
    let with_first = |cells: &[String]| -> Vec<String> {
        cells[..1].iter().chain(&cells[columns.clone()]).cloned().collect()
    };
    let names: Vec<&str> = header[..1].iter().chain(&header[columns.clone()]).copied().collect();
    format_table(&names, &rows.iter().map(|row| with_first(row)).collect::<Vec<_>>())
}

/// A table whose widest columns are made narrower, their texts broken between words; all columns
/// lie to the left.
fn format_broken(header: &[&str], rows: &[Vec<String>], width: usize) -> String {
    let cells = |column: usize| {
        let cells = rows.iter().filter_map(move |row| row.get(column)).map(String::as_str);
        cells.chain(header.get(column).copied())
    };
    let longest = |column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..header.len()).map(longest).collect();
    let most = width.saturating_sub(2 * header.len());
    while widths.iter().sum::<usize>() > most {
        let Some(widest) = widths.iter_mut().max().filter(|widest| **widest > TEXT_MIN) else {
            break;
        };
        *widest -= 1;
    }
    let mut text = String::new();
    let mut write_row = |cells: &[&str]| {
        let wrapped = cells.iter().zip(&widths);
        let cells: Vec<Vec<String>> =
            wrapped.map(|(cell, &width)| wrap_lines(cell, width)).collect();
        for line in 0..cells.iter().map(Vec::len).max().unwrap_or(0) {
            let mut row = String::new();
            for (cell, &width) in cells.iter().zip(&widths) {
                let piece = cell.get(line).map_or("", String::as_str);
                row.push_str(&format!("  {piece:<width$}"));
            }
            text.push_str(row.trim_end());
            text.push('\n');
        }
    };
    write_row(header);
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    write_row(&rule.iter().map(String::as_str).collect::<Vec<_>>());
    for row in rows {
        write_row(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    text
}

/// A text in lines of at most `width` characters, broken between words; a longer word is cut.
pub(crate) fn wrap_lines(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        let used = lines.last().map_or(0, |line| line.chars().count());
        if used > 0 && used + 1 + word.len() > width {
            lines.push(String::new());
        } else if used > 0 {
            word.insert(0, ' ');
        }
        for piece in word.chunks(width.max(1)) {
            let used = lines.last().map_or(0, |line| line.chars().count());
            if used > 0 && used + piece.len() > width {
                lines.push(String::new());
            }
            if let Some(line) = lines.last_mut() {
                line.extend(piece);
            }
        }
    }
    lines
}

fn longest_line(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

/// A number with `decimals` decimals; a value that would print as zero keeps two digits.
pub(crate) fn format_number(value: f64, decimals: usize) -> String {
    if value != 0.0 && value.abs() < 0.5 * 10f64.powi(-(decimals as i32)) {
        return format!("{value:.0e}");
    }
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["raw".into(), "16.00".into()], vec!["vecinfer-2".into(), "2.0".into()]];
        let expected = "  codec        bits\n  ----------  -----\n  raw         16.00\n  \
                        vecinfer-2    2.0\n";
        assert_eq!(format_table(&["codec", "bits"], &rows), expected);
    }

    #[test]
    fn a_table_of_many_columns_is_continued_below() {
        let names: Vec<String> = (0..40).map(|layer| format!("layer {layer}")).collect();
        let header: Vec<&str> =
            std::iter::once("codec").chain(names.iter().map(|n| &**n)).collect();
        let row = |codec: &str| {
            let errors = (0..40).map(|layer| format!("0.{layer:04}"));
            std::iter::once(codec.to_owned()).chain(errors).collect::<Vec<_>>()
        };
        let rows = [row("kivi-4"), row("k=uniform(b=4,g=32,axis=channel)")];
        let text = format_fitted(&header, &rows, COLUMNS);
        assert!(longest_line(&text) <= COLUMNS, "{text}");
        for layer in 0..40 {
            let figure = format!("0.{layer:04}");
            assert_eq!(text.matches(&figure).count(), 2, "{text}");
        }
        assert!(text.matches("kivi-4").count() >= 4, "{text}");
        assert_eq!(
            format_fitted(&header[..3], &[row("raw")[..3].to_vec()], COLUMNS).lines().count(),
            3
        );
    }

    #[test]
    fn long_texts_are_broken_between_words() {
        let words = "keys and values under the same windows ".repeat(4);
        let spec = "k=mean+qpca/grid(rate=2.35)/huffman;v=mean+gain+pca/grid(rate=1.75)".repeat(2);
        let rows = [vec![words.clone(), spec.clone(), "yes".to_owned()]];
        let text = format_fitted(&["claim", "spec", "holds"], &rows, COLUMNS);
        assert!(longest_line(&text) <= COLUMNS, "{text}");
        assert_eq!(text.matches("windows").count(), 4, "{text}");
        let kept = |text: &str| text.chars().filter(|c| "+%/=".contains(*c)).count();
        assert_eq!(kept(&text), kept(&spec), "{text}");
        assert_eq!(wrap_lines("ab cde f", 3), ["ab", "cde", "f"]);
        assert_eq!(wrap_lines("abcdefgh i", 3), ["abc", "def", "gh", "i"]);
    }

    #[test]
    fn small_numbers_do_not_print_as_zero() {
        assert_eq!(format_number(0.0, 4), "0.0000");
        assert_eq!(format_number(0.01234, 4), "0.0123");
        assert_eq!(format_number(-3.2e-7, 4), "-3e-7");
    }
}
