// Closes what target_begin.hpp opened. GCC instantiates templates at the end of the file, so its options stay
// on.
#if defined(EP_MODEL_TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
