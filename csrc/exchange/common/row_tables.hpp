// Tables of the rows that an operation moves or sums, as slot numbers, for a device that holds the rows and
// computes on them itself. Combine's slots are numbered from the start of the bank, [rank][token][choice].
#pragma once

#include <bit>
#include <cstdint>

#include "exchange/common/group.hpp"
#include "exchange/common/params.hpp"

namespace ep {

// Throws BadArgument where rows are given that the phases would not read.
inline void check_place(const Group& group, const char* what, const void* rows) {
  if (group.rows_on_device && rows != nullptr)
    throw BadArgument(what, "rows in host memory", "on the device, as this exchange has them");
}

inline uint64_t slot_of(const Layout& layout, uint32_t rank, uint32_t row) {
  return uint64_t(rank) * layout.max_tokens * layout.choices_per_token + row;
}

// The expert outputs of one token of this rank, in the order they are added: calls fn(slot, weight), where
// the weight is 1 if the expert's rank has weighted already.
template <class Fn>
void for_each_output(const Group& group, const CombineState& state, uint32_t token, Fn&& fn) {
  const Layout& layout = group.layout;
  const int32_t* ids = state.dispatch->ids.data() + size_t(token) * layout.top_k;
  if (state.reduction == Reduction::kRank) {
    for (uint64_t ranks = group.owners(ids) & state.returned; ranks != 0; ranks &= ranks - 1)
      fn(slot_of(layout, uint32_t(std::countr_zero(ranks)), token), 1.0f);
    return;
  }
  for (uint32_t k = 0; k < layout.top_k; ++k)
    if (ids[k] >= 0 && (state.returned >> group.owner[ids[k]] & 1) != 0)
      fn(slot_of(layout, uint32_t(group.owner[ids[k]]), token * layout.choices_per_token + k),
         state.weights[size_t(token) * layout.top_k + k]);
}

// Tables [rows][width] of which row is the sum, in order, of which others times which weights; -1 = no more.
// slots: of each row, where the caller cannot know it.
struct SumTable {
  int64_t* slots;  // [rows]
  int64_t* terms;  // [rows, width]
  float* weights;  // [rows, width]
  uint32_t width;
};

// What combine_send puts where: slot and, as rows in COMPACT order, terms of each output. The slots of source
// s are those of rank s. Returns how many outputs; there are no more than entries.
uint32_t output_table(const Group& group, const DispatchState& state, Reduction reduction,
                      const SumTable& table);

// What combine_recv sums for each of the T tokens; terms are slots. table.slots is not written.
void sum_table(const Group& group, const CombineState& state, const SumTable& table);

}  // namespace ep
