// SPDX-License-Identifier: Apache-2.0

//! What is shown: a table that is drawn over itself in a terminal, or printed now and then without one.

use std::{fmt::Write as _, io::IsTerminal as _, time::Duration};

use lab::Transport;

use super::{
    PODS,
    load::{PATHS, Path, Summary},
};
use crate::cmd::write;

/// How wide the table is, with and without bars.
const WIDE: usize = 94;
const NARROW: usize = 79;

/// The numbers of one row.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    /// From the beginning.
    pub(super) total: Summary,
    /// Since the last change, or of the last second: what the endpoint columns show.
    pub(super) recent: Summary,
}

/// Where it is shown.
pub(super) struct Screen {
    live: bool,
    bars: bool,
    /// Lines to go up before the next drawing.
    drawn: usize,
    /// Why nothing can be shown any more.
    failed: Option<String>,
}

impl Screen {
    pub(super) fn open() -> Screen {
        let stdout = std::io::stdout();
        let columns = rustix::termios::tcgetwinsize(&stdout).map_or(WIDE, |size| usize::from(size.ws_col));
        // A line that wraps cannot be drawn over.
        let live = stdout.is_terminal() && columns >= NARROW;
        let mut screen = Screen { live, bars: columns >= WIDE, drawn: 0, failed: None };
        if live {
            screen.show("\x1b[?25l");
        }
        screen
    }

    /// The error is one sentence: something could not be shown.
    pub(super) fn outcome(&self) -> Result<(), String> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn show(&mut self, text: &str) {
        if self.failed.is_none() {
            self.failed = write(text).err();
        }
    }

    /// There is a terminal, and the table can be drawn as often as one likes.
    pub(super) fn is_live(&self) -> bool {
        self.live
    }

    /// A line that stays.
    pub(super) fn say(&mut self, line: &str) {
        self.erase();
        self.show(&format!("{}\n", self.paint(line)));
    }

    /// The table, below everything that was said.
    pub(super) fn table(&mut self, heading: &str, rows: &[Row; PATHS.len()]) {
        self.erase();
        let lines = table(heading, rows, self.bars);
        let text: String = lines.iter().map(|line| format!("{}\n", self.paint(line))).collect();
        self.show(&text);
        if self.live {
            self.drawn = lines.len();
        }
    }

    /// Lets the table stand.
    pub(super) fn keep(&mut self) {
        self.drawn = 0;
    }

    fn erase(&mut self) {
        if self.drawn > 0 {
            self.show(&format!("\x1b[{}A\x1b[J", self.drawn));
            self.drawn = 0;
        }
    }

    /// `{b}`, `{d}`, `{g}`, `{r}`, `{0}` become bold, dim, green, red and plain, or nothing.
    fn paint(&self, line: &str) -> String {
        let mut line = line.to_owned();
        for (mark, code) in [("{b}", "1"), ("{d}", "2"), ("{g}", "32"), ("{r}", "31"), ("{0}", "0")] {
            let code = if self.live { format!("\x1b[{code}m") } else { String::new() };
            line = line.replace(mark, &code);
        }
        // Logs may end up where only ASCII is safe; a terminal has blocks.
        if self.live { line.replace('#', "\u{2588}") } else { line }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.live {
            self.show("\x1b[?25h");
        }
    }
}

fn table(heading: &str, rows: &[Row; PATHS.len()], bars: bool) -> Vec<String> {
    let width = if bars { WIDE } else { NARROW };
    let mut head = format!(
        "{:<7}{:<18}{:<4}{:<15}{:>6}{:>7}{:>7}",
        "from", "to", "", "service", "sent", "failed", "p50"
    );
    let cell = cell_width(bars);
    for pod in PODS {
        let _ = write!(head, "{pod:>cell$}");
    }
    let mut lines =
        vec![String::new(), format!("{{b}}{head}{{0}}"), format!("{{d}}{}{{0}}", "-".repeat(width))];
    lines.extend(PATHS.iter().zip(rows).map(|(path, row)| line(path, row, bars)));
    lines.push(String::new());
    lines.push(format!("{{d}}{heading}{{0}}"));
    lines
}

fn cell_width(bars: bool) -> usize {
    if bars { 10 } else { 5 }
}

fn line(path: &Path, row: &Row, bars: bool) -> String {
    let transport = match path.transport {
        Transport::Tcp => "tcp",
        Transport::Udp => "udp",
        Transport::Sctp => "sctp",
    };
    let from = if path.from == "a2" { "pod a2" } else { path.from };
    let to = path.destination().to_string();
    let service = format!("{} {}", path.service, path.kind);
    let Summary { requests, failed, p50, .. } = &row.total;
    let color = if *failed > 0 { "{r}" } else { "" };
    let p50 = p50.map_or("-".to_owned(), time);
    let mut line =
        format!("{from:<7}{to:<18}{transport:<4}{service:<15}{requests:>6}{color}{failed:>7}{{0}}{p50:>7}");
    let answered: usize = row.recent.answers.iter().sum();
    for count in row.recent.answers {
        let share = count * 100 / answered.max(1);
        let text = match count {
            0 => "-".to_owned(),
            _ if bars => format!("{} {share:>3}%", bar(share)),
            _ => format!("{share}%"),
        };
        let (color, cell) = (if count == 0 { "{d}" } else { "{g}" }, cell_width(bars));
        let _ = write!(line, "{color}{text:>cell$}{{0}}");
    }
    line
}

/// Four cells for the whole.
fn bar(share: usize) -> String {
    let full = (share * 4).div_ceil(100).clamp(1, 4);
    format!("{:>4}", "#".repeat(full))
}

/// As few digits as tell enough.
pub(super) fn time(duration: Duration) -> String {
    match duration.as_secs_f64() * 1e3 {
        millis if millis < 1.0 => format!("{:.0} us", millis * 1e3),
        millis if millis < 10.0 => format!("{millis:.1} ms"),
        millis if millis < 1000.0 => format!("{millis:.0} ms"),
        millis => format!("{:.1} s", millis / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_keeps_its_width() {
        let full = Summary {
            requests: 999_999,
            failed: 99_999,
            p50: Some(Duration::from_millis(999)),
            answers: [5000, 0, 5000],
        };
        let rows: [Row; PATHS.len()] =
            std::array::from_fn(|_| Row { total: full.clone(), recent: full.clone() });
        let plain = Screen { live: false, bars: true, drawn: 0, failed: None };
        for (bars, width) in [(true, WIDE), (false, NARROW)] {
            let lines: Vec<_> = table("heading", &rows, bars).iter().map(|line| plain.paint(line)).collect();
            for line in &lines[1..=2 + PATHS.len()] {
                assert_eq!(line.chars().count(), width, "{line}");
            }
        }
        let text = plain.paint(&line(&PATHS[0], &rows[0], true));
        assert!(text.starts_with("client 198.51.100.10:80  tcp shop LB "), "{text}");
        assert!(text.ends_with("##  50%         -   ##  50%"), "{text}");
    }

    #[test]
    fn colours_are_for_terminals() {
        let plain = Screen { live: false, bars: true, drawn: 0, failed: None };
        assert_eq!(plain.paint("{b}a{0} ##"), "a ##");
        let mut live = Screen { live: true, bars: true, drawn: 0, failed: None };
        assert_eq!(live.paint("{b}a{0} #"), "\x1b[1ma\x1b[0m \u{2588}");
        live.live = false;
    }

    #[test]
    fn times_read_well() {
        for (micros, text) in
            [(7, "7 us"), (999, "999 us"), (1_500, "1.5 ms"), (42_000, "42 ms"), (2_340_000, "2.3 s")]
        {
            assert_eq!(time(Duration::from_micros(micros)), text);
        }
    }
}
