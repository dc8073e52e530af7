# cmake --install: the library, its public headers, and what find_package(Sirtaki) needs.
include(CMakePackageConfigHelpers)

set(sirtaki_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Sirtaki")
set(sirtaki_rpath "$ORIGIN" "${LibTorch_ROOT_DIR}/lib")
set_target_properties(sirtaki PROPERTIES INSTALL_RPATH "${sirtaki_rpath}")

install(TARGETS sirtaki EXPORT SirtakiTargets LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY frameworks/include/ DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(EXPORT SirtakiTargets NAMESPACE Sirtaki:: DESTINATION "${sirtaki_config_dir}")

set(sirtaki_mpi_include_dirs "")
set(sirtaki_mpi_libraries "")
if(SIRTAKI_HAVE_MPI)
  set(sirtaki_mpi_include_dirs "${MPI_C_INCLUDE_DIRS}")
  set(sirtaki_mpi_libraries "${MPI_C_LIBRARIES}")
endif()
configure_package_config_file(cmake/SirtakiConfig.cmake.in "${PROJECT_BINARY_DIR}/SirtakiConfig.cmake"
  INSTALL_DESTINATION "${sirtaki_config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/SirtakiConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/SirtakiConfig.cmake" "${PROJECT_BINARY_DIR}/SirtakiConfigVersion.cmake" cmake/FindLibTorch.cmake
  DESTINATION "${sirtaki_config_dir}")
