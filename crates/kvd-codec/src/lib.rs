//! The page format and every codec side: the reference encode and decode.
