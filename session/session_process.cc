// Which medium the job of this process has.
#include <algorithm>
#include <string>

#include "core/config/mpi_families.h"
#include "core/machine/elastic_notice.h"
#include "session/session.h"
#include "tcp/place.h"

namespace sirtaki::session {

namespace {

core::MediumChoice ChooseMedium(const StartOptions& options) {
  const core::MediumChoice wanted = options.config.medium;
  if (wanted != core::MediumChoice::kAuto) return wanted;
  // An MPI that has started the ranks is there, and carries more than TCP: other networks, and the
  // program's own messages.
  const bool by_mpi = std::ranges::any_of(core::MpiFamilies(), [&](const core::MpiFamily& family) {
    return std::ranges::any_of(family.variables, [&](const std::string& name) {
      return options.environment.Find(name).has_value();
    });
  });
  const bool over_tcp = !by_mpi && !options.communicator && tcp::IsToldPlace(options.environment);
  return over_tcp ? core::MediumChoice::kTcp : core::MediumChoice::kMpi;
}

}  // namespace

core::Status Session::CreateOfProcess(const StartOptions& options,
                                      std::shared_ptr<Session>* session) {
  if (options.environment.Find(core::kElasticVariable)) return CreateElastic(options, session);
  if (ChooseMedium(options) == core::MediumChoice::kMpi) return CreateMpi(options, session);
  return CreateTcp(options, session);
}

}  // namespace sirtaki::session
