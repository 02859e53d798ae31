// SPDX-License-Identifier: Apache-2.0

//! Which word was meant by one that is none.

/// The word that is a slip of the pen away from this one: another case, or an edit or two. Short words are like many
/// others, so of those only one edit.
pub(super) fn closest(word: &str, words: &[&'static str]) -> Option<&'static str> {
    let near = words.iter().filter_map(|meant| Some((distance(word, meant)?, *meant)));
    near.min_by_key(|(edits, _)| *edits).map(|(_, meant)| meant)
}

/// How many letters must be put in, left out, replaced or swapped with the next one; nothing if too many.
fn distance(word: &str, meant: &str) -> Option<usize> {
    let (a, b) = (word.as_bytes(), meant.as_bytes());
    let limit = if b.len() <= SHORT { 1 } else { 2 };
    // Most words end here, and at little cost: an edit changes no more than two of the letters that occur.
    let strange = (letters(a) ^ letters(b)).count_ones();
    if a.len().abs_diff(b.len()) > limit || b.len() > LONGEST || strange > 2 * limit as u32 {
        return None;
    }
    let is_same = |i: usize, j: usize| a[i].eq_ignore_ascii_case(&b[j]);
    // A row for each letter of `a`: how far what is before it is from each beginning of `b`.
    let mut rows = [[0; LONGEST + 1]; LONGEST + 4];
    rows[0] = std::array::from_fn(|j| j);
    for i in 0..a.len() {
        rows[i + 1][0] = i + 1;
        for j in 0..b.len() {
            let replaced = rows[i][j] + usize::from(!is_same(i, j));
            let mut edits = replaced.min(rows[i][j + 1] + 1).min(rows[i + 1][j] + 1);
            if i > 0 && j > 0 && is_same(i, j - 1) && is_same(i - 1, j) {
                edits = edits.min(rows[i - 1][j - 1] + 1);
            }
            rows[i + 1][j + 1] = edits;
        }
    }
    Some(rows[a.len()][b.len()]).filter(|edits| *edits <= limit)
}

/// A bit for each letter that occurs.
fn letters(word: &[u8]) -> u32 {
    word.iter().fold(0, |letters, byte| letters | 1 << (byte & 31))
}

/// Words up to this length are short,
const SHORT: usize = 4;
/// and none that can be meant is longer.
const LONGEST: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips() {
        let words = &["ports", "clusterIP", "clusterIPs", "type", "nodePort", "addresses", "Service", "Node"];
        for (word, meant) in [
            ("prots", Some("ports")),
            ("port", Some("ports")),
            ("ports ", Some("ports")),
            ("clusterIp", Some("clusterIP")),
            ("clusterips", Some("clusterIPs")),
            ("nodeport", Some("nodePort")),
            ("adresses", Some("addresses")),
            ("address", Some("addresses")),
            ("tpye", Some("type")),
            ("Servce", Some("Service")),
            ("Srevcie", Some("Service")),
            ("Role", None),
            ("Pod", None),
            ("Secret", None),
            ("", None),
            ("tape recorder", None),
            ("é", None),
        ] {
            assert_eq!(closest(word, words), meant, "{word}");
        }
        let long = "x".repeat(LONGEST + 2);
        assert_eq!(closest(&long, &["xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"]).map(str::len), Some(LONGEST));
        assert_eq!(closest(&(long + "x"), &["xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"]), None);
    }
}
