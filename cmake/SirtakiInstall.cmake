# cmake --install: the library, its public headers, and what find_package(Sirtaki) needs. `pip install` and wheels have all of it in
# the package sirtaki (pyproject.toml has the folders).
include(CMakePackageConfigHelpers)

set(sirtaki_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Sirtaki")
set(sirtaki_torch_rpath "${LibTorch_ROOT_DIR}/lib")
set(sirtaki_config_torch "${LibTorch_ROOT_DIR}")
set(sirtaki_namelink "")
if(SKBUILD)   # torch lies beside the package then; a wheel has no links, so the file has the name that is asked for
  set(sirtaki_torch_rpath "$ORIGIN/../../torch/lib" "$ORIGIN/../../nvidia/cu13/lib")
  set(sirtaki_config_torch "\${PACKAGE_PREFIX_DIR}/torch")
  set(sirtaki_namelink NAMELINK_SKIP)
  set_target_properties(sirtaki PROPERTIES VERSION "${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}")
endif()
set_target_properties(sirtaki PROPERTIES INSTALL_RPATH "$ORIGIN;${sirtaki_torch_rpath}")

install(TARGETS sirtaki EXPORT SirtakiTargets 
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT libsirtaki NAMELINK_COMPONENT libsirtaki-dev ${sirtaki_namelink})
if(SKBUILD AND SIRTAKI_STATIC_DEPENDENCIES)   # the terms of what is in there of others
  foreach(other IN ITEMS libboost-dev libyaml-cpp-dev libspdlog-dev libfmt-dev libhwy-dev libxxhash-dev nlohmann-json3-dev)
    install(FILES "/usr/share/doc/${other}/copyright" DESTINATION sirtaki/licenses RENAME "${other}.txt" OPTIONAL)
  endforeach()
endif()
install(DIRECTORY frameworks/include/ DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT libsirtaki-dev
  FILES_MATCHING PATTERN "*.h")
install(EXPORT SirtakiTargets NAMESPACE Sirtaki:: DESTINATION "${sirtaki_config_dir}" COMPONENT libsirtaki-dev)

set(sirtaki_mpi_include_dirs "")
set(sirtaki_mpi_libraries "")
set(sirtaki_any_mpi OFF)
if(SIRTAKI_HAVE_MPI)
  set(sirtaki_mpi_include_dirs "${MPI_C_INCLUDE_DIRS}")
  set(sirtaki_mpi_libraries "${MPI_C_LIBRARIES}")
elseif(SIRTAKI_MPI_HEADERS)
  set(sirtaki_any_mpi ON)
endif()
configure_package_config_file(cmake/SirtakiConfig.cmake.in "${PROJECT_BINARY_DIR}/SirtakiConfig.cmake"
  INSTALL_DESTINATION "${sirtaki_config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/SirtakiConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/SirtakiConfig.cmake" "${PROJECT_BINARY_DIR}/SirtakiConfigVersion.cmake" cmake/FindLibTorch.cmake
  DESTINATION "${sirtaki_config_dir}" COMPONENT libsirtaki-dev)
