// Tables of the rows that an operation moves or sums, for a device that holds the rows and computes on them
// itself. Rows are slot numbers. Combine's slots are numbered from the start of the bank,
// [rank][token][choice].
#pragma once

#include <bit>
#include <cstdint>

#include "exchange/common/group.hpp"
#include "exchange/common/params.hpp"

namespace ep {

// Throws BadArgument if the caller passes rows but the phases would not read them.
inline void check_place(const Group& group, const char* what, const void* rows) {
  if (group.rows_on_device && rows != nullptr)
    throw BadArgument(what, "rows in host memory", "on the device, as this exchange has them");
}

inline uint64_t slot_of(const Layout& layout, uint32_t rank, uint32_t row) {
  return uint64_t(rank) * layout.max_tokens * layout.choices_per_token + row;
}

// Visits the expert outputs of one token of this rank in the order of the sum: calls fn(slot, weight). The
// weight is 1 if the expert's rank has already applied it.
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

// For each output row, the rows to add, in order, and their weights; -1 ends the list. slots: where each
// output row goes, if the caller cannot derive it.
struct SumTable {
  int64_t* slots;  // [rows]
  int64_t* terms;  // [rows, width]
  float* weights;  // [rows, width]
  uint32_t width;
};

// The table of combine_send: the slot of each output and its terms, as rows in COMPACT order. Outputs for
// source s use the slots of rank s. Returns the number of outputs, at most the number of entries.
uint32_t output_table(const Group& group, const DispatchState& state, Reduction reduction,
                      const SumTable& table);

// The table of combine_recv: the sum for each of the T tokens. Terms are slots. table.slots is not written.
void sum_table(const Group& group, const CombineState& state, const SumTable& table);

}  // namespace ep
