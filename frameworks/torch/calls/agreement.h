// Finding out whether all ranks have the same before anything is built on it. Collective; costs one
// small all-gather when they have. `timeout`: of each call that is made for it; 0: none.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

// Throws on every rank if any rank has an error, with the first rank's text.
void AgreeOnErrors(const std::string& what, const std::string& error, const SessionSet& set);

// Throws Mismatch on every rank if the lists differ, naming the first position at which they do and
// what each group of ranks has there; or, if a rank has an error, that error.
void AgreeOnList(const std::string& what, const std::vector<std::string>& list,
                 const std::string& error, const SessionSet& set,
                 std::chrono::milliseconds timeout = {});

// Does the same, and returns what each rank has given in `mine`, in their order, by the same all-gather.
std::vector<std::int64_t> AgreeAndGather(const std::string& what,
                                         const std::vector<std::string>& list,
                                         const std::string& error, std::int64_t mine,
                                         const SessionSet& set);

// Compares as AgreeOnList does, but gives the lists of all ranks if they differ, and nothing if
// they are equal. `ranks` (may be null) receives whose lists they are: those of the ranks of the set
// that have not joined.
std::vector<std::vector<std::string>> ExchangeLists(const std::string& what,
                                                    const std::vector<std::string>& list,
                                                    const std::string& error, const SessionSet& set,
                                                    std::chrono::milliseconds timeout = {},
                                                    std::vector<int>* ranks = nullptr);

// Pure: "a on ranks 0, 2; b on rank 1". The items are those of these ranks, in their order.
std::string GroupsText(const std::vector<std::string>& items, const std::vector<int>& ranks);

// Pure: what AgreeOnList says about lists of these ranks. Precondition: they differ.
std::string FirstDifference(const std::vector<std::vector<std::string>>& lists,
                            const std::vector<int>& ranks);

}  // namespace sirtaki::detail
