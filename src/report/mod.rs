//! Output for people: tables, SVG drawings, HTML pages and Chrome traces, from plain figures.

pub mod curve;
pub mod distribution;
pub mod frontier;
pub mod memory;
pub mod page;
pub mod quadrants;
pub mod schemas;
pub mod table;
pub mod timeline;

use std::borrow::Cow;

/// `text` on one line, safe for a terminal or an XML document: characters that these can't hold
/// become `\u{fffd}`.
#[must_use]
pub fn plain(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{fffe}' | '\u{ffff}')
            || ('\u{2028}'..='\u{202e}').contains(&c)
            || ('\u{2066}'..='\u{2069}').contains(&c)
    };
    if text.contains(harmful) {
        Cow::Owned(text.replace(harmful, "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn names_cannot_steer_a_terminal() {
        assert_eq!(plain("layer1.0 µ"), "layer1.0 µ");
        assert_eq!(plain("a\u{1b}[31mb\nc\0"), "a\u{fffd}[31mb\u{fffd}c\u{fffd}");
    }
}
