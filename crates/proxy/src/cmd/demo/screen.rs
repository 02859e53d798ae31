// SPDX-License-Identifier: Apache-2.0

//! What is shown: a table that is drawn over itself in a terminal, or printed now and then without one.

use std::{
    fmt::Write as _,
    io::{IsTerminal as _, Write as _},
    time::Duration,
};

use lab::Transport;

use super::{
    PODS,
    load::{PATHS, Path, Summary},
};

/// No line is wider than this.
pub(super) const WIDTH: usize = 98;

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
    /// Lines to go up before the next drawing.
    drawn: usize,
}

impl Screen {
    pub(super) fn open() -> Screen {
        let live = std::io::stdout().is_terminal();
        if live {
            print!("\x1b[?25l");
        }
        Screen { live, drawn: 0 }
    }

    /// There is a terminal, and the table can be drawn as often as one likes.
    pub(super) fn is_live(&self) -> bool {
        self.live
    }

    /// A line that stays.
    pub(super) fn say(&mut self, line: &str) {
        self.erase();
        println!("{}", self.paint(line));
    }

    /// The table, below everything that was said.
    pub(super) fn table(&mut self, heading: &str, rows: &[Row; PATHS.len()]) {
        self.erase();
        let lines = table(heading, rows);
        for line in &lines {
            println!("{}", self.paint(line));
        }
        if self.live {
            self.drawn = lines.len();
            let _ = std::io::stdout().flush();
        }
    }

    /// Lets the table stand.
    pub(super) fn keep(&mut self) {
        self.drawn = 0;
    }

    fn erase(&mut self) {
        if self.drawn > 0 {
            print!("\x1b[{}A\x1b[J", self.drawn);
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
            print!("\x1b[?25h");
            let _ = std::io::stdout().flush();
        }
    }
}

fn table(heading: &str, rows: &[Row; PATHS.len()]) -> Vec<String> {
    let mut head = format!(
        "{:<8}{:<18}{:<4}{:<15}{:>8}{:>7}{:>8}",
        "from", "to", "", "service", "requests", "failed", "p50"
    );
    for pod in PODS {
        let _ = write!(head, "{pod:>10}");
    }
    let mut lines =
        vec![String::new(), format!("{{b}}{head}{{0}}"), format!("{{d}}{}{{0}}", "-".repeat(WIDTH))];
    lines.extend(PATHS.iter().zip(rows).map(|(path, row)| line(path, row)));
    lines.push(String::new());
    lines.push(format!("{{d}}{heading}{{0}}"));
    lines
}

fn line(path: &Path, row: &Row) -> String {
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
    let mut line = format!(
        "{from:<8}{to:<18}{transport:<4}{service:<15}{requests:>8}{color}{failed:>7}{{0}}{:>8}",
        p50.map_or("-".to_owned(), time)
    );
    let answered: usize = row.recent.answers.iter().sum();
    for count in row.recent.answers {
        let share = count * 100 / answered.max(1);
        let cell = if count == 0 { "-".to_owned() } else { format!("{} {share:>3}%", bar(share)) };
        let color = if count == 0 { "{d}" } else { "{g}" };
        let _ = write!(line, "{color}{cell:>10}{{0}}");
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
    fn no_line_is_too_wide() {
        let full = Summary {
            requests: 9_999_999,
            failed: 999_999,
            p50: Some(Duration::from_millis(1999)),
            answers: [5000, 0, 5000],
        };
        let rows: [Row; PATHS.len()] =
            std::array::from_fn(|_| Row { total: full.clone(), recent: full.clone() });
        let plain = Screen { live: false, drawn: 0 };
        for line in table("heading", &rows).iter().map(|line| plain.paint(line)) {
            assert!(line.chars().count() <= WIDTH, "{} columns: {line}", line.chars().count());
        }
        let line = plain.paint(&line(&PATHS[0], &rows[0]));
        assert!(line.starts_with("client  198.51.100.10:80  tcp shop LB "), "{line}");
        assert!(line.ends_with("##  50%         -   ##  50%"), "{line}");
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
