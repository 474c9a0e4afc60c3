//! A table in plain text: the first column to the left, the others to the right.

/// Lays out `rows` under `header`; every row has as many cells as the header.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
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

/// A number with `decimals` decimals; a value that would print as zero keeps two digits.
pub(crate) fn number(value: f64, decimals: usize) -> String {
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
        assert_eq!(table(&["codec", "bits"], &rows), expected);
    }

    #[test]
    fn small_numbers_do_not_print_as_zero() {
        assert_eq!(number(0.0, 4), "0.0000");
        assert_eq!(number(0.01234, 4), "0.0123");
        assert_eq!(number(-3.2e-7, 4), "-3e-7");
    }
}
