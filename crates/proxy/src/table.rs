// SPDX-License-Identifier: Apache-2.0

//! Rows in columns, for people.

/// Each column is as wide as its widest cell; the last one runs free, and nothing follows it.
pub fn columns<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let head = head.map(str::to_owned);
    let all = || std::iter::once(&head).chain(rows);
    let mut widths = [0; N];
    for row in all() {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in all() {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_they_need() {
        let rows = [["a".to_owned(), "b c".to_owned()], ["\u{e4}\u{f6}\u{fc}x".to_owned(), String::new()]];
        assert_eq!(columns(["X", "Y"], &rows), "X     Y\na     b c\n\u{e4}\u{f6}\u{fc}x\n");
    }
}
