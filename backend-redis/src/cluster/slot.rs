use std::sync::LazyLock;

/// How many slots a Redis Cluster has.
pub(crate) const SLOTS: u16 = 16_384;

/// The slot of a key, as the Redis Cluster specification defines it: CRC16 of the key modulo 16,384;
/// if there is something between the first `{` and the first `}` after it, of that alone.
pub(crate) fn slot(key: &str) -> u16 {
    crc16(hashed(key.as_bytes())) % SLOTS
}

/// The smallest number whose decimal digits hash to `slot`: as the tag of a key, it puts the key there.
pub(crate) fn tag(slot: u16) -> u32 {
    TAGS[usize::from(slot)]
}

static TAGS: LazyLock<Box<[u32]>> = LazyLock::new(|| {
    let mut tags = vec![u32::MAX; usize::from(SLOTS)].into_boxed_slice();
    let mut missing = tags.len();
    let mut number = 0;
    while missing > 0 {
        let tag = &mut tags[usize::from(slot(&number.to_string()))];
        if *tag == u32::MAX {
            *tag = number;
            missing -= 1;
        }
        number += 1;
    }
    tags
});

/// The part of a key that decides about its slot.
fn hashed(key: &[u8]) -> &[u8] {
    let Some(open) = key.iter().position(|byte| *byte == b'{') else {
        return key;
    };
    let rest = &key[open + 1..];
    match rest.iter().position(|byte| *byte == b'}') {
        None | Some(0) => key,
        Some(close) => &rest[..close],
    }
}

/// CRC-16/XMODEM: polynomial 0x1021, nothing reflected, begins with 0.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        let index = usize::from(crc >> 8) ^ usize::from(*byte);
        (crc << 8) ^ TABLE[index]
    })
}

const TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 {
                crc << 1
            } else {
                (crc << 1) ^ 0x1021
            };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-16/XMODEM, and the slots that the documentation of Redis shows.
    #[test]
    fn the_published_vectors() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot("123456789"), 12739);
        assert_eq!(slot("foo"), 12182);
        assert_eq!(slot("bar"), 5061);
        assert_eq!(slot("somekey"), 11058);
        assert_eq!(slot(""), 0);
    }

    #[test]
    fn only_what_is_between_the_first_braces_counts() {
        assert_eq!(slot("{user1000}.following"), slot("{user1000}.followers"));
        assert_eq!(hashed(b"foo{}{bar}"), b"foo{}{bar}");
        assert_eq!(hashed(b"foo{{bar}}zap"), b"{bar");
        assert_eq!(hashed(b"foo{bar}{zap}"), b"bar");
        assert_eq!(hashed(b"a}b{c"), b"a}b{c");
        assert_eq!(hashed(b"}{x}"), b"x");
    }

    #[test]
    fn every_slot_has_a_tag() {
        for number in 0..SLOTS {
            assert_eq!(slot(&format!("a{{{}}}b", tag(number))), number);
        }
        assert_eq!(tag(slot("0")), 0);
    }
}
