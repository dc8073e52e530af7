// Horovod's flags, with their meaning here. Those for which there is none are accepted where the
// program runs the same without, and refused where it would not.
#include <string>
#include <utility>

#include "core/config/config_table.h"
#include "launch/options/option_rows.h"

namespace sirtaki::launch {

using core::Status;

namespace {

// Sets the library's option to what Horovod's value means for it.
OptionRow RowOf(const core::HorovodAlias& alias) {
  std::string help = "Sets " + std::string(alias.option);
  if (!alias.on.empty()) help.append(" to ").append(alias.on);
  if (alias.on.empty() && !alias.off.empty())
    help.append(" to ").append(alias.off).append(" if false");
  return {std::string(alias.flag), 0, std::string(alias.value), help + ".",
          [&alias](const Given& given, LaunchOptions* out) {
            const auto meaning = core::MeaningOf(alias, given.value);
            return meaning ? SetKnob(given, alias.option, *meaning, out) : Status::Ok();
          }};
}

OptionRow Ignored(std::string name, std::string value, std::string why) {
  std::string help = "Changes nothing: " + why + ".";
  return {std::move(name), 0, std::move(value), std::move(help),
          [why](const Given& given, LaunchOptions* out) {
            out->notes.push_back(given.from + " changes nothing: " + why);
            return Status::Ok();
          }};
}

OptionRow Refused(std::string name, std::string value, std::string why) {
  std::string help = "Refused: " + why + ".";
  return {std::move(name), 0, std::move(value), std::move(help),
          [why](const Given& given, LaunchOptions* /*out*/) {
            return given.value == "false" ? Status::Ok() : WrongFlag(given, why);
          }};
}

}  // namespace

OptionGroup HorovodOptions() {
  const std::string one_thread = "one thread at a time calls MPI in any case";
  const std::string no_cycle = "nothing is polled in cycles here";
  const std::string own_tuner = "the autotuner here has no such setting";
  OptionGroup group = {
      "Horovod's names for these options",
      {Ignored("mpi-threads-disable", "", one_thread),
       Ignored("no-mpi-threads-disable", "", one_thread),
       Switch("mpi", 0,
              "Start the ranks by an MPI's launcher, as --launcher mpi does; --gloo is --no-mpi.",
              &LaunchOptions::mpi),
       Ignored("cycle-time-ms", "MS", no_cycle),
       Ignored("hierarchical-allgather", "", "gathering chooses its algorithm itself"),
       Ignored("no-hierarchical-allgather", "", "gathering chooses its algorithm itself"),
       Ignored("torus-allreduce", "", "reductions choose their algorithm themselves"),
       Ignored("no-torus-allreduce", "", "reductions choose their algorithm themselves"),
       Ignored("autotune-warmup-samples", "N", own_tuner),
       Ignored("autotune-steps-per-sample", "N", own_tuner),
       Ignored("autotune-bayes-opt-max-samples", "N", own_tuner),
       Ignored("autotune-gaussian-process-noise", "X", own_tuner),
       Ignored("num-nccl-streams", "N", "a device has one lane"),
       Ignored("thread-affinity", "CORE", "the background thread sleeps when it has nothing to do"),
       Ignored("gloo-timeout-seconds", "S", "gloo is not used"),
       Ignored("timeline-mark-cycles", "", no_cycle),
       Ignored("no-timeline-mark-cycles", "", no_cycle),
       Refused("jsrun", "", "jsrun is not known; --launcher takes openmpi, mpich, srun or a path"),
       Refused("tcp", "", "choose MPI's transports by --mpi-args")}};
  for (const core::HorovodAlias& alias : core::HorovodAliases()) {
    if (!alias.flag.empty()) group.rows.push_back(RowOf(alias));
  }
  return group;
}

}  // namespace sirtaki::launch
